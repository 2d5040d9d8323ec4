"""What is known of a check, or a stream, that is over, without a word of it. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

from guard.conversation.example import Message
from guard.verdict import Verdict
from guard.weights.card import Card
from serve.engine import Check
from serve.engine.codes import Code
from serve.policy.logic import Decision
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling

# Of the verdicts of other checks than answers' no counter is told.
Purpose = Literal["answer", "explanation"]
Ending = Literal["end", "violation", "cut_off", "failed"]


@dataclass(frozen=True)
class RequestFacts:
    """The sender of a request, and the ids by which others' records name it."""

    request_id: str
    wire_format: str
    tenant: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True)
class JudgedVersion:
    """What one version of a rule said where not all versions of it decide: a verdict, or the code
    of why it has none.
    """

    rule: str
    version: str  # empty where it was not asked
    is_trial: bool
    mode: str
    decides: bool
    verdict: Verdict | None
    code: Code | None = None

    @property
    def word(self) -> str:
        return self.verdict.word if self.verdict else "unjudged"

    @property
    def violates(self) -> bool | None:
        """None without a verdict."""
        return self.verdict.violates if self.verdict else None

    def disagrees(self, other: JudgedVersion) -> bool:
        return None not in (self.verdict, other.verdict) and self.violates != other.violates


@dataclass(frozen=True)
class CheckRecord:
    """A check that is over: its verdicts and what they mean, or else the code of its `failure`.

    Its `purpose` is the answer, or to explain another check's: then it is of a part of a
    conversation, and its verdicts are nobody's answer. `said` is what each version of the rules
    said that are on trial. `began_s` is Unix time. `cards` are those of the rule set's rules that
    were served then, `other_cards` of what else may have judged: what is on trial, and what came
    meanwhile. `content_hash` is empty where nobody has a key. So is each hash of `policies`, which
    the request states, by their names among the rules.
    """

    request: RequestFacts
    rule_set: RuleSet
    cards: Mapping[str, Card]
    began_s: float
    latency_s: float = 0.0
    check: Check | None = None
    decision: Decision | None = None
    failure: Code | None = None
    purpose: Purpose = "answer"
    said: Sequence[JudgedVersion] = ()
    other_cards: Sequence[Card] = ()
    content_hash: str = ""
    policies: Mapping[str, str] = field(default_factory=dict)

    def judging(self) -> list[Card]:
        """The cards of the versions that gave the verdicts, as far as they are known."""
        judged = {said.version for said in self.said}
        if self.check is not None:
            judged |= {self.version_of(verdict.rule) for verdict in self.check.verdicts}
        known = [*self.cards.values(), *self.other_cards]
        return [card for card in known if card.version in judged]

    def version_of(self, rule: str) -> str:
        """The version that judged the rule; empty for a rule that was removed before."""
        if self.check is not None and rule in self.check.versions:
            return self.check.versions[rule]
        if rule in self.cards:
            return self.cards[rule].version
        return ""

    def trials(self) -> list[tuple[JudgedVersion, JudgedVersion]]:
        """Each version on trial and its champion, where both were asked."""
        return [pair for pair in pairwise(self.said) if pair[0].rule == pair[1].rule]

    @property
    def verdict(self) -> str:
        """The verdict of the whole check: "unjudged" without an answer."""
        return self.decision.ruling.value if self.decision else "unjudged"


@dataclass(frozen=True)
class StreamRecord:
    """A stream that is over: how many characters of its reply came, how many of them a check has
    `judged`, and how many were released. `ruling` is its last check's.
    """

    request: RequestFacts
    rule_set: RuleSet
    began_s: float
    ending: Ending
    failure: Code | None
    came: int
    judged: int
    released: int
    ruling: Ruling

    @property
    def verdict(self) -> str:
        """Of the whole reply: an "allow" only where it ended and no character is unjudged."""
        is_whole = self.ending == "end" and self.judged == self.came
        if self.ruling is Ruling.ALLOW and not is_whole:
            return Ruling.UNJUDGED.value
        return self.ruling.value


@runtime_checkable
class ContentHasher(Protocol):
    """An observer that has a key. A record carries what it makes of the content, and no content."""

    def content_hash(self, messages: Sequence[Message]) -> str:
        """A keyed hash of a conversation; empty without a key."""
        ...


class Observer(Protocol):
    """An object that is told of every check and stream."""

    def checked(self, record: CheckRecord) -> None:
        """Note a check that is over. If this raises, its caller gets the error, not the verdict."""
        ...

    def streamed(self, record: StreamRecord) -> None:
        """Note a stream that is over. If this raises, its last line is an error."""
        ...

    def close(self) -> None: ...
