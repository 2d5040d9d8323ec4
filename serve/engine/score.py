"""What is asked of the guard engine and what it answers. Values only; knows nothing of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

from guard.conversation.example import Message
from guard.verdict import Verdict
from serve.engine.codes import Code


class ScoreRequest(NamedTuple):
    """One rule put to one conversation. `adapter` is a name the engine serves, None the bare base.
    Requests of different `cache_salt` share no keys and values. The text of no rule `is_policy`.
    """

    messages: tuple[Message, ...]
    rule_text: str
    adapter: str | None
    cache_salt: str | None = None
    is_policy: bool = False


class Score(NamedTuple):
    """One answer: a logit in nats, finite, uncalibrated. `logit` is log P(yes) - log P(no) at the
    verdict token, or a head's. `cached_tokens` + `computed_tokens` = the prompt's length; of heads
    that share one request the first has what it computed, so that computed tokens add up to those
    that were computed. `latency_ms` runs from submission to the end of the request's batch.
    """

    logit: float
    cached_tokens: int
    computed_tokens: int
    latency_ms: float


@dataclass(frozen=True)
class Refusal:
    """Why there is no answer to a request: its `subject`, and `why` it cannot be judged, also as a
    `code`. What `is_internal` is for whoever runs the engine: it may name files, or quote a
    library.
    """

    subject: str
    why: str
    code: Code
    is_internal: bool = False

    def __str__(self) -> str:
        return f"{self.subject}: {self.why}"


@dataclass(frozen=True)
class EngineCounters:
    """What an engine holds, and what it has done since its start."""

    adapters: int = 0
    adapter_loads: int = 0
    swap_ins: int = 0
    scheduled_tokens: int = 0
    forward_passes: int = 0
    cache_tokens: int = 0
    step_s: float = 0.0

    def __add__(self, counters: EngineCounters) -> EngineCounters:
        """The counters of two engines side by side."""
        names = [figure.name for figure in fields(self)]
        return EngineCounters(
            **{name: getattr(self, name) + getattr(counters, name) for name in names}
        )


@dataclass(frozen=True)
class Check:
    """The verdicts of the rules that could be judged, in the order of the rules; `refused` are the
    others, by name. Of each rule that was answered, also if the answer is refused since not all
    could be read, `versions` is the version that answered, `latencies_ms` the time from submission
    to answer. No version of the `undecided` rules
    was to decide: they allow.
    """

    verdicts: tuple[Verdict, ...]
    refused: Mapping[str, Refusal]
    cached_tokens: int
    computed_tokens: int
    wall_ms: float
    versions: Mapping[str, str] = field(default_factory=dict)
    latencies_ms: Mapping[str, float] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()

    def without_unseen_languages(self) -> Check:
        """The check in which a rule has no verdict on a language that it has not seen."""
        why = "it is in a language that the rule's validation rows do not have"
        refused = dict(self.refused)
        for verdict in self.verdicts:
            if verdict.unseen_language:
                refused[verdict.rule] = Refusal("conversation", why, "unseen_language")
        judged = tuple(verdict for verdict in self.verdicts if not verdict.unseen_language)
        return replace(self, verdicts=judged, refused=refused)

    @property
    def outcome(self) -> Literal["allow", "violation", "unjudged"]:
        """Of all rules: a violation outweighs a rule without a verdict, and that every "allow"."""
        if any(verdict.violates for verdict in self.verdicts):
            return "violation"
        if self.refused:
            return "unjudged"
        return "allow"

    def renamed(self, names: Mapping[str, str]) -> Check:
        """The check with other names in the place of these."""
        verdicts: list[Verdict] = []
        for verdict in self.verdicts:
            verdicts.append(verdict._replace(rule=names.get(verdict.rule, verdict.rule)))
        refused = {names.get(name, name): refusal for name, refusal in self.refused.items()}
        versions = {names.get(name, name): version for name, version in self.versions.items()}
        return replace(self, verdicts=tuple(verdicts), refused=refused, versions=versions)


def joined(rules: Sequence[str], checks: Sequence[Check]) -> Check:
    """Checks of one conversation by different rules as one, in the order of `rules`."""
    verdicts: dict[str, Verdict] = {}
    refused: dict[str, Refusal] = {}
    versions: dict[str, str] = {}
    latencies_ms: dict[str, float] = {}
    for check in checks:
        verdicts |= {verdict.rule: verdict for verdict in check.verdicts}
        refused |= check.refused
        versions |= check.versions
        latencies_ms |= check.latencies_ms
    return Check(
        verdicts=tuple(verdicts[rule] for rule in rules if rule in verdicts),
        refused={rule: refused[rule] for rule in rules if rule in refused},
        cached_tokens=sum(check.cached_tokens for check in checks),
        computed_tokens=sum(check.computed_tokens for check in checks),
        wall_ms=max(check.wall_ms for check in checks),
        versions=versions,
        latencies_ms=latencies_ms,
    )
