"""Measures cells of the grid on a running engine. Knows nothing of files, tables or plots."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.bench.latency.grid import BASE, Cell, shares_conversation
from serve.bench.scores import scores_of
from serve.bench.workload.prompts import RULE_TEXT, conversation, wordings
from serve.engine import GuardEngine
from serve.engine.score import Score, ScoreRequest

LOWER_BOUND_SEED = 1_000_000  # gives the lower bound's conversations other words
SHORTEST = 60  # tokens of a conversation


@dataclass(frozen=True)
class LatencySample:
    """One measurement of all verdicts of one conversation."""

    wall_ms: float
    engine_ms: float
    latencies_ms: tuple[float, ...]
    cached_tokens: int
    computed_tokens: int
    swap_ins: int


@dataclass(frozen=True)
class LowerBound:
    """One base prompt of `measured_tokens`; its times are scaled to the needed tokens."""

    wall_ms: float
    engine_ms: float
    measured_tokens: int


@dataclass(frozen=True)
class Repeat:
    """The modes on one conversation, and the lower bound. Modes that do not share the conversation
    are in the first repeats only.
    """

    samples: Mapping[str, LatencySample]
    needed_tokens: int
    lower_bound: LowerBound


class LatencyMeter:
    """Measures cells on a running engine.

    `adapters`: the adapters' names by method, at least as many as any cell has rules.
    `context_tokens`: the length of the longest prompt.
    """

    def __init__(
        self,
        engine: GuardEngine,
        prompts: PromptBuilder,
        context_tokens: int,
        adapters: Mapping[str, Sequence[str]],
    ) -> None:
        self._engine, self._prompts = engine, prompts
        self._context_tokens, self._adapters = context_tokens, adapters
        names = list(adapters.values())[-1]
        rule_texts = list(dict.fromkeys(engine.rules[name].rule_text for name in names))
        # An adapter may read nothing of its rule; the base has to be told.
        self.titles = wordings([text for text in rule_texts if text] or [RULE_TEXT], len(names))
        self.texts = [""] * len(names)
        if all(rule_texts):
            self.texts = self.titles
        self._seed = 0

    @property
    def modes(self) -> list[str]:
        """The bare base, then the methods."""
        return [BASE, *self._adapters]

    def warm_up(self) -> None:
        """Use every adapter once, and the longest step once: the first time is always slow."""
        self.repeat(Cell(100, len(self.texts), 1), 0)
        self.repeat(Cell(1000, 1, 1), 0)

    def repeat(self, cell: Cell, number: int, bar: tqdm | None = None) -> Repeat:
        """Measure every mode of this repeat once on a fresh conversation. Every repeat begins with
        another mode.
        """
        self._seed += 1
        length = cell.length(number, self._engine.backend.block_size)
        messages = conversation(self._prompts, length, self._seed)
        samples: dict[str, LatencySample] = {}
        modes = [mode for mode in self.modes if number < cell.times(mode)]
        first = number % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            samples[mode] = self._sample(messages, cell, mode)
            if bar is not None:
                bar.update(cell.tokens(mode))
        texts = self.texts[: cell.rules]
        needed = len(self._prompts.prefix_ids(messages)) + sum(map(self._suffix_tokens, texts))
        return Repeat(samples, needed, self._lower_bound(needed))

    def suffix_tokens(self, rules: int, mode: str) -> int:
        """The tokens that a rule adds to the mode's prompt, as the mean over the first `rules`."""
        return round(statistics.mean(map(self._suffix_tokens, self._texts_of(mode)[:rules])))

    def _texts_of(self, mode: str) -> list[str]:
        return self.titles if mode == BASE else self.texts

    def _suffix_tokens(self, text: str) -> int:
        return len(self._prompts.suffix_ids(text))

    def _lower_bound(self, needed_tokens: int) -> LowerBound:
        tokens = min(needed_tokens, self._context_tokens - 1)
        cell = Cell(max(tokens - self._suffix_tokens(self.titles[0]), SHORTEST), 1, 1)
        seed = LOWER_BOUND_SEED + self._seed
        messages = conversation(self._prompts, cell.prompt_tokens - 1, seed)
        sample = self._sample(messages, cell, BASE)
        scale = needed_tokens / sample.computed_tokens
        return LowerBound(sample.wall_ms * scale, sample.engine_ms * scale, sample.computed_tokens)

    def _requests(self, messages: tuple[Message, ...], rules: int, mode: str) -> list[ScoreRequest]:
        texts = self._texts_of(mode)[:rules]
        if mode == BASE:
            return [ScoreRequest(messages, text, None) for text in texts]
        requests = []
        for text, name in zip(texts, self._adapters[mode], strict=False):
            requests.append(ScoreRequest(messages, text, name))
        return requests

    def _sample(self, messages: tuple[Message, ...], cell: Cell, mode: str) -> LatencySample:
        """Measure all verdicts of one mode, from an empty cache.

        Raises GuardError for a refusal, or if the cache was not empty.
        """
        requests, engine = self._requests(messages, cell.rules, mode), self._engine
        engine.forget()
        before, started = engine.counters, time.perf_counter()
        outcomes = engine.score(requests)
        wall_ms = 1000 * (time.perf_counter() - started)
        after = engine.counters
        scores = scores_of(outcomes, where=f"{cell.prompt_tokens} tokens, mode {mode}")
        _check_cache_was_empty(scores, mode)
        return LatencySample(
            wall_ms=wall_ms,
            engine_ms=1000 * (after.step_s - before.step_s),
            latencies_ms=tuple(score.latency_ms for score in scores),
            cached_tokens=sum(score.cached_tokens for score in scores),
            computed_tokens=sum(score.computed_tokens for score in scores),
            swap_ins=after.swap_ins - before.swap_ins,
        )


def _check_cache_was_empty(scores: Sequence[Score], mode: str) -> None:
    """Raise GuardError if anything came from an earlier measurement.

    The first request must find an empty cache, and a LoRA shares with nobody.
    """
    cached = sum(score.cached_tokens for score in scores)
    if scores[0].cached_tokens or (cached and not shares_conversation(mode)):
        problem = "the prefix cache leaked between measurements"
        remedy = "Run `make doctor` and the tests of serve/"
        raise GuardError(
            problem, where=f"mode {mode}", got=f"{cached} cached tokens", remedy=remedy
        )


@dataclass(frozen=True)
class Measured:
    """The repeats of every cell, and the cells left out because they would have taken too long."""

    repeats: Mapping[Cell, Sequence[Repeat]]
    left_out: tuple[str, ...]


def measure(meter: LatencyMeter, grid: Sequence[Cell], seconds: float | None) -> Measured:
    """Measure the grid. Optional cells are measured only if they fit into `seconds` from the start;
    None for no limit.
    """
    started = time.perf_counter()
    measured: dict[Cell, list[Repeat]] = {}
    left_out: list[str] = []
    total = sum(cell.all_tokens(meter.modes) for cell in grid)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="measuring") as bar:
        for cell in grid:
            slowest_mode = max(meter.modes, key=cell.tokens)
            expected_s = cell.tokens(slowest_mode) * _ms_per_token(measured, slowest_mode) / 1000
            is_late = seconds is not None and time.perf_counter() - started + expected_s > seconds
            point = f"{cell.prompt_tokens} tokens x {cell.rules} rules"
            if cell.optional and is_late:
                left_out.append(f"{point}, which would take about {expected_s:.0f} s")
                bar.total -= cell.all_tokens(meter.modes)
                continue
            bar.set_postfix_str(point)
            measured[cell] = [meter.repeat(cell, number, bar) for number in range(cell.repeats)]
        bar.refresh()
    return Measured(measured, tuple(left_out))


def _ms_per_token(measured: Mapping[Cell, Sequence[Repeat]], mode: str) -> float:
    """The largest time a token of any cell so far, because long prompts cost more a token."""
    most = 0.0
    for cell, repeats in measured.items():
        for repeat in repeats[: cell.times(mode)]:
            most = max(most, repeat.samples[mode].wall_ms / cell.tokens(mode))
    return most
