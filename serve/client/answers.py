"""What the server answers, as values, and what is raised where it has no verdict. Knows nothing of
connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Word = Literal["allow", "violation", "unjudged"]


class CheckFailed(Exception):
    """There is no verdict: the server refused the check, was too late, or was not reached.

    `status` is HTTP's; None where there was no response. `code` says why in one of the server's
    words, as `too_late` or `overloaded`; empty where the server did not say.
    """

    def __init__(self, message: str, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class NotAllowed(Exception):
    """A stream ends here: what it would say next is a violation, or could not be judged."""

    def __init__(self, answer: CheckAnswer) -> None:
        super().__init__(f"{answer.verdict}: {', '.join(answer.decided_by)}")
        self.answer = answer


@dataclass(frozen=True)
class RuleAnswer:
    """One rule's verdict, and `by` what; a violation is `p_violation` >= `threshold`. `code` is
    "unseen_language" where it is not `confident` for that, else empty.
    """

    rule: str
    violates: bool
    p_violation: float
    threshold: float
    confident: bool
    by: str
    code: str = ""


@dataclass(frozen=True)
class RuleUnjudged:
    """Why a rule has no verdict: one of the server's words, and a sentence."""

    code: str
    reason: str


@dataclass(frozen=True)
class RuleExplanation:
    """The turn that carries a violation, counted from 0, and the rule's probabilities at the ends
    of the turn before it (None where there is none, or it was not judged) and of it.
    """

    turn: int
    p_before: float | None
    p_after: float


@dataclass(frozen=True)
class CheckAnswer:
    """The verdicts of a check. `unjudged` are the rules without one, and why. `explanations` are of
    the violated rules, where they were asked for. Of stated `policies` the first is "policies.0".
    """

    verdict: Word
    decided_by: tuple[str, ...]
    results: Mapping[str, RuleAnswer]
    unjudged: Mapping[str, RuleUnjudged]
    cached_tokens: int
    computed_tokens: int
    latency_ms: float
    explanations: Mapping[str, RuleExplanation] = field(default_factory=dict)
    policies: Mapping[str, RuleAnswer] = field(default_factory=dict)

    @property
    def is_allowed(self) -> bool:
        """Whether the verdict is "allow": no rule is violated, or the rule set excuses those that
        are.
        """
        return self.verdict == "allow"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> CheckAnswer:
        """The answer in a response's body. Raises CheckFailed if it is none."""
        try:
            return cls(
                verdict=body["verdict"],
                decided_by=tuple(body["decided_by"]),
                results=_by_rule(body["results"]),
                unjudged={
                    entry["rule"]: RuleUnjudged(entry["code"], entry["reason"])
                    for entry in body["unjudged"]
                },
                cached_tokens=body["usage"]["cached_tokens"],
                computed_tokens=body["usage"]["computed_tokens"],
                latency_ms=body["latency_ms"],
                explanations={
                    rule: RuleExplanation(entry["turn"], entry.get("p_before"), entry["p_after"])
                    for rule, entry in body.get("explanations", {}).items()
                },
                policies=_by_rule(body.get("policies", ())),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckFailed(f"the response is no check of this version: {error!r}") from error


def _by_rule(entries: Iterable[Mapping[str, Any]]) -> dict[str, RuleAnswer]:
    results: dict[str, RuleAnswer] = {}
    for entry in entries:
        results[entry["rule"]] = RuleAnswer(
            rule=entry["rule"],
            violates=entry["verdict"] == "violation",
            p_violation=entry["p_violation"],
            threshold=entry["threshold"],
            confident=entry["confident"],
            by=entry["by"],
            code=entry.get("code") or "",
        )
    return results
