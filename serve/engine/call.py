"""What is on its way through the engine, and what has come back. Knows nothing of how it gets there."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from guard.errors import GuardError
from guard.verdict import Calibration
from serve.engine.score import Check, Refusal, Score

if TYPE_CHECKING:
    from serve.engine.decoder import EngineOutput, Loaded


@dataclass
class Call:
    """Requests on their way through the engine, and what has come back, in the order they were asked."""

    outcomes: list[Score | Refusal | None]
    waiting: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # request id -> place in outcomes, time of submission
    started: float = field(default_factory=time.perf_counter)
    finished: float = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing is in flight any more."""
        return not self.waiting

    def settle(self, reading: EngineOutput) -> None:
        """Put an answer in its place. A logit that is not a number is no answer."""
        place, submitted = self.waiting.pop(reading.request_id)
        self.finished = time.perf_counter()
        if not math.isfinite(reading.logit):
            why = f"the logit is {reading.logit}: the adapter or the base is numerically broken. Train the adapter again"
            self.refuse(place, "verdict", why)
            return
        latency_ms = (self.finished - submitted) * 1000
        self.outcomes[place] = Score(
            reading.logit, reading.cached_tokens, reading.computed_tokens, latency_ms
        )

    def refuse(self, place: int, what: str, why: str) -> None:
        """Put a refusal in its place."""
        self.finished = time.perf_counter()
        self.outcomes[place] = Refusal(what, why)

    def results(self) -> list[Score | Refusal]:
        """One outcome per request. Raises GuardError while requests are in flight, or if their batch failed."""
        settled = [outcome for outcome in self.outcomes if outcome is not None]
        if len(settled) < len(self.outcomes):
            what = "requests are still in flight, or their batch failed"
            remedy = "Ask again; the cause stands in the error of the batch"
            raise GuardError(
                what, got=f"{len(settled)} of {len(self.outcomes)} outcomes", remedy=remedy
            )
        return settled


@dataclass(frozen=True)
class InFlight:
    """A request in vLLM: who asked what, what was submitted, in which turn; how often it began again, and how often because of itself.

    `own_tokens` are its prompt's without what its call shares with one before it: the clock of the turns goes on by them at its answer.
    """

    asked: Call
    name: str
    token_ids: list[int]
    loaded: Loaded | None
    activation_start: int
    cache_salt: str | None
    own_tokens: int
    turn: int
    restarts: int = 0
    no_numbers: int = 0


@dataclass
class FairQueue:
    """Which turn each of a call's requests comes in, conversation by conversation.

    A turn is the number of tokens that are counted before it: `clock` when the call came, and `length` more for each of the call's further
    ones. What reads a conversation's shared tokens comes in the turn of the request that computes them, until its own tokens fill a turn.
    """

    clock: int
    length: int
    _asked: int = 0  # tokens of the call so far
    _shared: dict[Hashable, tuple[int, int]] = field(
        default_factory=dict
    )  # conversation -> its turn, the tokens behind it so far

    def next(self, conversation: Hashable, tokens: int, shared_tokens: int) -> tuple[int, int]:
        """The next request's turn, and its own tokens: without `shared_tokens`, if one before it computes those of `conversation`."""
        if shared_tokens and conversation in self._shared:
            turn, behind = self._shared[conversation]
            own_tokens = tokens - shared_tokens
            self._shared[conversation] = turn, behind + own_tokens
            turn += behind // self.length * self.length
        else:
            turn, own_tokens = self.clock + self._asked // self.length * self.length, tokens
            if shared_tokens:
                self._shared[conversation] = turn, tokens - shared_tokens
        self._asked += own_tokens
        return turn, own_tokens


@dataclass(frozen=True)
class OpenCheck:
    """A check under way: what `GuardEngine.open_check` starts, `step` drives and `result` ends."""

    rules: tuple[str, ...]
    calibrations: Mapping[str, Calibration]
    asked: Call

    def result(self) -> Check:
        """The finished check. Raises GuardError unless it is `asked.done`."""
        outcomes = dict(zip(self.rules, self.asked.results(), strict=True))
        scores = {rule: outcome for rule, outcome in outcomes.items() if isinstance(outcome, Score)}
        return Check(
            verdicts=tuple(
                self.calibrations[rule].verdict(rule, score.logit) for rule, score in scores.items()
            ),
            refused={
                rule: outcome for rule, outcome in outcomes.items() if isinstance(outcome, Refusal)
            },
            cached_tokens=sum(score.cached_tokens for score in scores.values()),
            computed_tokens=sum(score.computed_tokens for score in scores.values()),
            wall_ms=(self.asked.finished - self.asked.started) * 1000,
        )
