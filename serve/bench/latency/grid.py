"""Measures a grid of conversation lengths and numbers of rules on a running engine. Knows nothing of files, tables or plots."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tqdm import tqdm

from guard.errors import GuardError
from guard.example import Message
from guard.prompt import PromptBuilder
from serve.bench.latency.report import MODES, CellRow, FurtherRow, Mode, RatioRow
from serve.bench.workload import RULE_TEXT, conversation, wordings
from serve.engine import GuardEngine
from serve.engine.score import Score, ScoreRequest

RULES_OF_LENGTH_SWEEP = 5
LENGTHS_OF_RULES_SWEEP = (1000, 5000)
LENGTHS = (100, 250, 500, 1000, 2000, 5000)
LONG = (10_000, 20_000, 32_000)
LONG_REPEATS = 3
LORA_REPEATS = 5  # at most: with a hundred rules it takes a hundred times as long as the rest
RULES = (1, 5, 10, 20, 50, 100)
MANY_RULES = ((1000, 200), (1000, 500))  # tokens, rules
LIMIT_SEED = 1_000_000  # so that the limit's conversations have words of their own
RESAMPLES = 2000  # of the bootstrap
QUICK_S = 120  # what the coarse grid may take to measure


@dataclass(frozen=True)
class Cell:
    """A point of the grid. `optional`: measured only if the time that is left allows."""

    prompt_tokens: int
    rules: int
    repeats: int
    optional: bool = False

    @property
    def lora_repeats(self) -> int:
        """How many of the repeats have LoRA."""
        return min(self.repeats, LORA_REPEATS)

    def times(self, mode: Mode) -> int:
        """In how many of the repeats the mode is measured."""
        return self.lora_repeats if mode == "lora" else self.repeats

    def tokens(self, mode: Mode) -> int:
        """About how many tokens one repeat must compute."""
        suffixes = 50 * self.rules
        return (
            self.rules * self.prompt_tokens + suffixes
            if mode == "lora"
            else self.prompt_tokens + suffixes
        )


def spread(cell: Cell, number: int, block: int) -> int:
    """The tokens of a cell's repeat `number`: at most half a block from the cell's, with remainders spread evenly over a block.

    The base computes again for every rule what the conversation has beyond whole blocks, so one length would flatter it or wrong it.
    """
    remainder = int((number % cell.repeats + 0.5) / cell.repeats * block)
    return cell.prompt_tokens + (remainder - cell.prompt_tokens + block // 2) % block - block // 2


def full_grid(repeats: int, *, wide: bool = False) -> list[Cell]:
    """Both sweeps, the cheapest cells first; `wide`: and beyond them, far more rules and far longer conversations."""
    points = {(length, RULES_OF_LENGTH_SWEEP) for length in LENGTHS} | {
        (length, rules) for length in LENGTHS_OF_RULES_SWEEP for rules in RULES
    }
    cells = [Cell(*point, repeats) for point in points]
    if wide:
        cells += [Cell(*point, repeats) for point in MANY_RULES]
        cells += [
            Cell(length, RULES_OF_LENGTH_SWEEP, min(repeats, LONG_REPEATS)) for length in LONG
        ]
    return sorted(cells, key=lambda cell: cell.tokens("lora"))


def by_engine(grid: Sequence[Cell]) -> list[list[Cell]]:
    """The grid in parts that are measured in an engine each: conversations beyond the sweeps take memory that the others should not see."""
    parts: dict[bool, list[Cell]] = {}
    for cell in grid:
        parts.setdefault(cell.prompt_tokens > max(LENGTHS), []).append(cell)
    return list(parts.values())


def quick_grid(repeats: int) -> list[Cell]:
    """The coarse grid, the cheapest cells first."""
    points = [(100, 5), (1000, 1), (1000, 5), (5000, 5), (1000, 20), (1000, 100)]
    return [Cell(*point, min(repeats, 2)) for point in points] + [Cell(5000, 100, 1, optional=True)]


@dataclass(frozen=True)
class Sample:
    """All verdicts of one conversation, once."""

    wall_ms: float
    engine_ms: float
    latencies_ms: tuple[float, ...]
    cached_tokens: int
    computed_tokens: int
    swap_ins: int


@dataclass(frozen=True)
class Repeat:
    """The three modes on one conversation, or two, and the limit: one base prompt of `limit_tokens`, its times scaled to what is needed.

    What is needed are the conversation's tokens, once, and those of every suffix.
    """

    samples: Mapping[Mode, Sample]
    needed_tokens: int
    limit_ms: float
    limit_engine_ms: float
    limit_tokens: int


class Bench:
    """Measures cells on a running engine. `names` are the adapters of each method, at least as many as any cell has rules."""

    def __init__(
        self,
        engine: GuardEngine,
        prompts: PromptBuilder,
        context_tokens: int,
        names: Mapping[str, Sequence[str]],
    ) -> None:
        self._engine, self._prompts, self._context_tokens, self._names = (
            engine,
            prompts,
            context_tokens,
            names,
        )
        read = list(dict.fromkeys(engine.rules[name].rule_text for name in names["alora"]))
        self.titles = wordings([text for text in read if text] or [RULE_TEXT], len(names["alora"]))
        self.texts = (
            self.titles if all(read) else [""] * len(self.titles)
        )  # what an adapter reads may be nothing; a base has to know
        self._seed = 0

    def warm_up(self) -> None:
        """Use every adapter once, and the longest step once: first times are slow everywhere."""
        self.repeat(Cell(100, len(self.texts), 1), 0)
        self.repeat(Cell(1000, 1, 1), 0)

    def repeat(self, cell: Cell, number: int, bar: tqdm | None = None) -> Repeat:
        """Measure every mode once on a fresh conversation, LoRA in the first repeats only, beginning with another mode in every repeat."""
        self._seed += 1
        messages = conversation(
            self._prompts, spread(cell, number, self._engine.block_size), self._seed
        )
        samples: dict[Mode, Sample] = {}
        modes = [mode for mode in MODES if number < cell.times(mode)]
        first = number % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            samples[mode] = self._sample(messages, cell, mode)
            if bar is not None:
                bar.update(cell.tokens(mode))
        needed = len(self._prompts.prefix_ids(messages)) + sum(
            len(self._prompts.suffix_ids(text)) for text in self.texts[: cell.rules]
        )
        tokens = min(needed, self._context_tokens - 1)
        suffix_tokens = len(self._prompts.suffix_ids(self.titles[0]))
        alone = Cell(max(tokens - suffix_tokens, 60), 1, 1)
        limit = self._sample(
            conversation(self._prompts, alone.prompt_tokens - 1, LIMIT_SEED + self._seed),
            alone,
            "base",
        )
        scale = needed / limit.computed_tokens
        return Repeat(
            samples, needed, limit.wall_ms * scale, limit.engine_ms * scale, limit.computed_tokens
        )

    def suffix_tokens(self, rules: int) -> int:
        """What a rule adds to an adapter's prompt, mean over the first `rules`."""
        return round(
            statistics.mean(len(self._prompts.suffix_ids(text)) for text in self.texts[:rules])
        )

    def _sample(self, messages: tuple[Message, ...], cell: Cell, mode: Mode) -> Sample:
        names = [None] * cell.rules if mode == "base" else self._names[mode][: cell.rules]
        texts = self.titles if mode == "base" else self.texts
        requests = [
            ScoreRequest(messages, text, name) for text, name in zip(texts, names, strict=False)
        ]
        self._engine.forget()
        engine_ms, filled, started = (
            self._engine.step_ms,
            self._engine.swap_ins,
            time.perf_counter(),
        )
        outcomes = self._engine.score(requests)
        wall_ms, engine_ms = (
            (time.perf_counter() - started) * 1000,
            self._engine.step_ms - engine_ms,
        )
        scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
        for outcome in outcomes:
            if not isinstance(outcome, Score):
                where, remedy = f"{cell.prompt_tokens} tokens, mode {mode}", "Run `make doctor`"
                raise GuardError(
                    "a benchmark request was refused", where=where, got=outcome, remedy=remedy
                )
        cached = sum(score.cached_tokens for score in scores)
        # Nothing may come from an earlier measurement: the first request finds an empty cache, and a LoRA shares with nobody.
        if scores[0].cached_tokens or (mode == "lora" and cached):
            what, remedy = (
                "the prefix cache leaked between measurements",
                "Run `make doctor` and the tests of serve/",
            )
            raise GuardError(
                what, where=f"mode {mode}", got=f"{cached} cached tokens", remedy=remedy
            )
        latencies_ms = tuple(score.latency_ms for score in scores)
        computed, brought = (
            sum(score.computed_tokens for score in scores),
            self._engine.swap_ins - filled,
        )
        return Sample(wall_ms, engine_ms, latencies_ms, cached, computed, brought)


def measure(
    bench: Bench, grid: Sequence[Cell], seconds: float | None
) -> tuple[dict[Cell, list[Repeat]], list[str]]:
    """The repeats of every cell, and what was left out because it would have taken more than `seconds` in all."""
    started = time.perf_counter()
    measured: dict[Cell, list[Repeat]] = {}
    left_out: list[str] = []
    lora_ms_per_token = 0.0
    total = sum(cell.times(mode) * cell.tokens(mode) for cell in grid for mode in MODES)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="measuring") as bar:
        for cell in grid:
            expected_s = cell.tokens("lora") * lora_ms_per_token / 1000
            if (
                cell.optional
                and seconds is not None
                and time.perf_counter() - started + expected_s > seconds
            ):
                left_out.append(
                    f"{cell.prompt_tokens} tokens x {cell.rules} rules, which would take about {expected_s:.0f} s"
                )
                bar.total -= sum(cell.times(mode) * cell.tokens(mode) for mode in MODES)
                continue
            bar.set_postfix_str(f"{cell.prompt_tokens} tokens x {cell.rules} rules")
            measured[cell] = [bench.repeat(cell, number, bar) for number in range(cell.repeats)]
            slowest_ms = max(
                repeat.samples["lora"].wall_ms for repeat in measured[cell][: cell.lora_repeats]
            )
            lora_ms_per_token = max(
                lora_ms_per_token, slowest_ms / cell.tokens("lora")
            )  # long prompts cost more a token
        bar.refresh()
    return measured, left_out


def summarise(
    cell: Cell, repeats: Sequence[Repeat], suffix_tokens: int
) -> tuple[list[CellRow], RatioRow]:
    """Medians over the repeats, single requests of all repeats, and the ratios: each the median of the repeats' own, with its spread."""
    rows = []
    for mode in MODES:
        samples = [repeat.samples[mode] for repeat in repeats if mode in repeat.samples]
        walls = [sample.wall_ms for sample in samples]
        latencies = [latency for sample in samples for latency in sample.latencies_ms]
        rows.append(
            CellRow(
                prompt_tokens=cell.prompt_tokens,
                suffix_tokens=suffix_tokens,
                rules=cell.rules,
                mode=mode,
                wall_ms=_median(walls),
                wall_ms_min=min(walls),
                wall_ms_max=max(walls),
                wall_ms_p95=float(np.percentile(walls, 95)),
                engine_ms=_median([sample.engine_ms for sample in samples]),
                mean_ms=float(np.mean(latencies)),
                p50_ms=float(np.percentile(latencies, 50)),
                p95_ms=float(np.percentile(latencies, 95)),
                p99_ms=float(np.percentile(latencies, 99)),
                cached_tokens=round(_median([sample.cached_tokens for sample in samples])),
                computed_tokens=round(_median([sample.computed_tokens for sample in samples])),
                swap_ins=max(sample.swap_ins for sample in samples),
                repeats=len(samples),
            )
        )
    over_alora = [
        repeat.samples["lora"].wall_ms / repeat.samples["alora"].wall_ms
        for repeat in repeats
        if "lora" in repeat.samples
    ]
    engine_over_limit = [
        repeat.samples["alora"].engine_ms / repeat.limit_engine_ms for repeat in repeats
    ]
    ratio = RatioRow(
        prompt_tokens=cell.prompt_tokens,
        rules=cell.rules,
        lora_over_alora=_median(over_alora),
        lora_over_alora_min=min(over_alora),
        lora_over_alora_max=max(over_alora),
        needed_tokens=round(_median([repeat.needed_tokens for repeat in repeats])),
        limit_ms=_median([repeat.limit_ms for repeat in repeats]),
        limit_engine_ms=_median([repeat.limit_engine_ms for repeat in repeats]),
        limit_measured_tokens=round(_median([repeat.limit_tokens for repeat in repeats])),
        alora_over_limit=_median(
            [repeat.samples["alora"].wall_ms / repeat.limit_ms for repeat in repeats]
        ),
        alora_engine_over_limit=_median(engine_over_limit),
        alora_engine_over_limit_min=min(engine_over_limit),
        alora_engine_over_limit_max=max(engine_over_limit),
    )
    return rows, ratio


def further_rules(measured: Mapping[Cell, Sequence[Repeat]]) -> list[FurtherRow]:
    """What a rule more costs between neighbouring numbers of rules on conversations of one length, repeat against repeat."""
    rows = []
    for length in sorted({cell.prompt_tokens for cell in measured}):
        cells = sorted(
            (cell for cell in measured if cell.prompt_tokens == length), key=lambda cell: cell.rules
        )
        for few, many in pairwise(cells):
            walls = [
                [repeat.samples["alora"].wall_ms for repeat in measured[cell]]
                for cell in (few, many)
            ]
            costs = [
                (more - less) / (many.rules - few.rules) for less, more in zip(*walls, strict=False)
            ]  # alike in length
            drawn = np.random.default_rng(0).choice(costs, (RESAMPLES, len(costs)))
            low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
            row = FurtherRow(
                prompt_tokens=length,
                rules=few.rules,
                up_to=many.rules,
                ms=_median(costs),
                ms_low=float(low),
                ms_high=float(high),
            )
            rows.append(row)
    return rows


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
