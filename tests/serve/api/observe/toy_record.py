"""Records of checks, for the tests of observers. Tests only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from guard.verdict import Verdict
from serve.api.observe.record import CheckRecord, RequestFacts, StreamRecord
from serve.engine import Check, Refusal
from serve.policy.logic import Decision
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling

MARKER = "marker-7f3a9c"  # stands in what is checked, and must stand nowhere else
CARD: Any = SimpleNamespace(version="0123abcd", model_dump=lambda **_: {"rule": "flagged"})
CHECK = Check(
    verdicts=(
        Verdict("flagged", 1.0, 0.75, 0.5, by="reader"),
        Verdict("fine", -1.0, 0.45, 0.5, confident=False),
    ),
    refused={"broken": Refusal("rule 'broken'", f"a reason that quotes {MARKER}", "nan")},
    cached_tokens=30,
    computed_tokens=12,
    wall_ms=4.0,
)
RULES = ("flagged", "fine", "broken")
FACTS = RequestFacts("request-1", "check", "shop", f"00-{'a' * 32}-{'b' * 16}-01")


def record(**replaced: Any) -> CheckRecord:
    """A check of three rules that was answered; `failure` for one that was not."""
    fields: dict[str, Any] = {
        "request": FACTS,
        "rule_set": RuleSet(RULES, RuleSet.any_of(RULES).violated_if, "support"),
        "cards": dict.fromkeys(RULES, CARD),
        "began_s": 1_700_000_000.25,
        "latency_s": 0.125,
        "check": CHECK,
        "decision": Decision(Ruling.VIOLATION, ("flagged",)),
    }
    if "failure" in replaced:
        fields |= {"check": None, "decision": None}
    return CheckRecord(**fields | replaced)


class Records:
    """An Observer that keeps what it is told."""

    def __init__(self) -> None:
        self.kept: list[CheckRecord] = []
        self.streams: list[StreamRecord] = []
        self.is_closed = False

    def checked(self, record: CheckRecord) -> None:
        self.kept.append(record)

    def streamed(self, record: StreamRecord) -> None:
        self.streams.append(record)

    def close(self) -> None:
        self.is_closed = True
