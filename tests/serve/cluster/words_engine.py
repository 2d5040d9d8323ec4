"""An engine without a model, and replicas of it: for faults, where the model does not matter.

A rule is violated where a message has the word VIOLATES, or BREAKS and the rule's name, and its
probability tells which weights said so. Imports neither torch nor vLLM, so that a replica starts in
a second.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.weights.card import Card, load_card
from serve.api.app import create_app
from serve.cluster.replica import ServedApp
from serve.engine import Call, OpenCheck, Score
from serve.engine.engine import policy_name
from serve.engine.score import EngineCounters
from serve.registry.registry import FOLDER_DIGITS
from serve.registry.reviews import ReviewStore
from tests.serve.cards import save_card
from tests.serve.toy_engine import CALIBRATION, ToyEngine, policy_scores

VIOLATES = "violates"  # in a message: every rule is violated
BREAKS = "breaks"  # in a message, before the name of a rule: this rule is violated
SLOWLY = "slowly"  # in a message: the batch takes SLOW_S
SLOW_S, STEP_S = 0.3, 0.003
BAD = b"bad"  # weights that are refused


def save_words(folder: Path, weights: bytes) -> Path:
    """A folder as training leaves it, with weights that no model can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PEFT_WEIGHTS).write_bytes(weights)
    calibration = {"temperature": 1.0, "threshold": 0.5, "uncertainty_band": (0.4, 0.6)}
    save_card(folder, folder.name, rule_text="Be nice.", **calibration)
    return folder


def version(folder: Path) -> Path:
    """The folder of these weights as the registry keeps it, beside the rule's."""
    place = folder.parent / "versions" / load_card(folder).version[:FOLDER_DIGITS]
    if not place.is_dir():  # others may be reading it
        part = place.with_suffix(".part")
        shutil.copytree(folder, part)
        part.rename(place)
    return place


def words(text: str) -> int:
    """The number of words in a text, which are the tokens of this engine."""
    return len(text.split())


class WordsEngine(ToyEngine):
    """Checks that are open together are answered by the next step."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        super().__init__()
        self.rules: dict[str, Card] = {}
        self._is_slow = False
        for name, folder in folders.items():
            self.serve(name, folder)

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> OpenCheck:
        """Open a check as `GuardEngine.open_check` does, by the weights that are served now."""
        names = tuple(self.rules if rules is None else rules)
        text = " ".join(message.content for message in messages)
        self._is_slow |= SLOWLY in text
        call = Call([None] * len(names), dict.fromkeys(names))  # type: ignore[arg-type]
        for index, name in enumerate(names):
            is_violated = VIOLATES in text or f"{BREAKS} {name}" in text
            sign = 1.0 if is_violated else -1.0
            logit = sign * (2.0 + _strength(self.rules[name]))
            call.outcomes[index] = Score(logit, cached_tokens=3, computed_tokens=2, latency_ms=1.0)
        call.outcomes += policy_scores(policies, messages)
        self.open.append(([*names], call))
        calibrations = {name: self.rules[name].calibration for name in names}
        stated = tuple(policy_name(index) for index in range(len(policies)))
        calibrations |= dict.fromkeys(stated, CALIBRATION)
        versions = {name: self.rules[name].version for name in names}
        return OpenCheck((*names, *stated), calibrations, call, versions)

    def step(self) -> None:
        """Answer all open checks."""
        time.sleep(SLOW_S if self._is_slow else STEP_S)
        self._is_slow = False
        for _, call in self.open:
            call.waiting.clear()
        self.open.clear()

    def serve(self, name: str, folder: Path | None = None) -> None:
        """Serve a rule. Raises GuardError for weights that are BAD, or not those of their card."""
        folder = folder or self.folder(name)
        card = load_card(folder)
        if (folder / PEFT_WEIGHTS).read_bytes() == BAD:
            raise GuardError("these weights are bad", where=folder, remedy="Train the rule again")
        self.rules[name] = card
        self.folders[name] = folder
        self.counters = EngineCounters(adapters=len(self.rules))

    def remove(self, name: str) -> None:
        super().remove(name)
        self.counters = EngineCounters(adapters=len(self.rules))


@dataclass(frozen=True)
class WordsStart:
    """Starts a replica's app around a WordsEngine. A StartApp."""

    timeout_s: float = 30.0
    review_store: ReviewStore | None = None

    def __call__(self, folders: Mapping[str, Path]) -> ServedApp:
        """The app; there is nothing to close."""
        app = create_app(WordsEngine(folders), self.timeout_s, review_store=self.review_store)
        return ServedApp(app, lambda: None)


def _strength(card: Card) -> float:
    """How many nats these weights add to a logit: every version has its own number."""
    return int(hashlib.sha256(card.version.encode()).hexdigest()[:4], 16) / 0xFFFF
