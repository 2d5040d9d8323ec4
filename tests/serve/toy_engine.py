"""Engines without a model, whose steps a test holds and breaks, and rule sets. Tests only."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from guard.conversation.chat import unread_parts
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.verdict import Calibration
from serve.engine import Call, OpenCheck, Refusal, Score
from serve.engine.engine import policy_name
from serve.engine.score import EngineCounters
from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet
from tests.serve.cards import save_trained

CALIBRATION = Calibration(threshold=0.25, uncertainty_band=(0.2, 0.3))
LOGITS = {"flagged": -1.0, "fine": -2.0}  # the one violates, the other does not
STAFF = {"rule": "flagged", "unless": {"metadata": {"audience": "staff"}}}
RULE_SETS = {
    "both": RuleSet(("flagged", "fine"), parse({"all_of": ["flagged", "fine"]}, "both"), "both"),
    "staff": RuleSet(("flagged",), parse(STAFF, "staff"), "staff"),
}

SCRATCH = tempfile.TemporaryDirectory(prefix="toy-rules-")


def policy_scores(policies: Sequence[str], messages: Sequence[Message]) -> list[Score]:
    """A policy is violated where a message has its last word."""
    text = " ".join(message.content for message in messages)
    logits = [5.0 if policy.split()[-1] in text else -5.0 for policy in policies]
    return [Score(logit, 3, 2, latency_ms=1.0) for logit in logits]


class ToyEngine:
    """Answers a check of n rules after n steps: with the rule's logit, or a refusal without one.

    Without `logits` it serves two rules: "fine", and "crash", which breaks the batch it is in. A
    message "cannot be judged" has a refusal for every rule; a check whose last message is "breaks"
    fails.
    """

    def __init__(self, logits: Mapping[str, float] | None = None) -> None:
        card = SimpleNamespace(
            rule_text="Be nice.",
            threshold=CALIBRATION.threshold,
            version="0123456789abcdef",
            model="tiny",
            method="alora",
            by="alora",
            merged_revision=None,
            model_dump=lambda **_: {},  # for the audit log
        )
        self.logits = logits or {}
        self.rules = dict.fromkeys(self.logits or ("crash", "fine"), card)
        self.is_usable = True
        self.counters = EngineCounters(adapters=len(self.rules), cache_tokens=4096)
        self.replaced: list[str] = []
        self.folders: dict[str, Path] = {}
        self.open: list[tuple[list[str], Call]] = []
        self.conversations: list[tuple[Message, ...]] = []
        self.salts: list[str | None] = []
        self.policies: list[tuple[str, ...]] = []
        self.on_step: Callable[[], object] = lambda: None
        self.may_step = threading.Event()
        self.may_step.set()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> OpenCheck:
        self.policies.append(tuple(policies))
        self.conversations.append(tuple(messages))
        self.salts.append(cache_salt)
        names = list(self.rules if rules is None else rules)
        if messages and messages[-1].content == "breaks":
            raise GuardError("the check broke")
        waiting: dict[str, Any] = dict.fromkeys(names)
        call = Call([*[None] * len(names), *policy_scores(policies, messages)], waiting)
        if any(message.content == "cannot be judged" for message in messages):
            call.outcomes = [Refusal("all", "it does not fit", "too_long")] * len(call.outcomes)
            waiting.clear()
        self.open.append((names[:], call))
        asked = (*names, *map(policy_name, range(len(policies))))
        calibrations = dict.fromkeys((*self.logits, *asked), CALIBRATION)
        versions = {name: self.rules[name].version for name in names if name in self.rules}
        by = dict.fromkeys(asked, "reader")
        by |= {name: self.rules[name].by for name in names if name in self.rules}
        return OpenCheck(asked, calibrations, call, versions, unread_parts(messages), by=by)

    def text_tokens(self, text: str) -> int:
        return len(text.split())

    def serve(self, name: str, folder: Path | None = None) -> None:
        self.replaced.append(name)

    def remove(self, name: str) -> None:
        del self.rules[name]

    def folder(self, name: str) -> Path:
        if name not in self.folders:
            folder = self.folders[name] = Path(SCRATCH.name) / name / "alora"
            if not folder.exists():
                save_trained(folder)
        return self.folders[name]

    def step(self) -> None:
        assert self.may_step.wait(10)
        self.on_step()
        for names, call in self.open:
            if "crash" in names:
                raise RuntimeError("the batch broke")
            if names and not call.done:
                name = names.pop(0)
                call.waiting.pop(name)
                call.outcomes[call.outcomes.index(None)] = self._outcome(name, call)

    def forget(self) -> None:
        assert not self.open or all(call.done for _, call in self.open)

    def cancel(self, call: Call) -> None:
        call.waiting.clear()
        self.open = [(names, other) for names, other in self.open if other is not call]

    def _outcome(self, name: str, call: Call) -> Score | Refusal:
        if name not in self.logits:
            return Refusal(name, f"toy answer for {name}", "too_long")
        return Score(self.logits[name], cached_tokens=3, computed_tokens=2, latency_ms=1.0)


class MortalEngine(ToyEngine):
    """Serves "fine", "crash" as ever, and "kill", which the engine does not survive.

    It is started again once `may_start`; whether it starts then, and whether it works after a batch
    has failed, a test decides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rules = dict.fromkeys(("fine", "crash", "kill"), self.rules["fine"])
        self.starts: list[float] = []  # by time.monotonic
        self.may_start = threading.Event()
        self.may_start.set()
        self.does_start = True
        self.does_work = True

    def step(self) -> None:
        if any("kill" in names for names, _ in self.open):
            assert self.may_step.wait(10)
            self.is_usable = False
        if not self.is_usable:
            raise RuntimeError("nothing could be cleared away")
        super().step()

    def works(self) -> bool:
        return self.does_work

    def restart(self, on_load: Callable[[], None]) -> None:
        on_load()
        self.starts.append(time.monotonic())
        assert self.may_start.wait(10)
        if not self.does_start:
            raise GuardError("the device is gone")
        self.open.clear()
        self.is_usable = self.does_work = True


class NeverAllows(ToyEngine):
    """The rule "always" is violated by everything; "refused" cannot be judged."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(("always", "refused"), 5.0))
        del self.logits["refused"]
