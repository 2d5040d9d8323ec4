"""Turns repeats into rows: medians, spreads, ratios, marginal costs. Knows nothing of engines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from serve.bench.latency.grid import Cell, method_that_repeats, method_that_shares
from serve.bench.latency.measure import LatencySample, Repeat
from serve.bench.latency.report import CellRow, MarginalCostRow, RatioRow
from serve.bench.report import Spread, median_count, percentiles

RESAMPLES = 2000  # by the bootstrap
INTERVAL = (2.5, 97.5)  # percentiles
FEWEST_PAIRS = 5  # of fewer, a bootstrap's interval is far too narrow, of one it has no width


def cell_rows(
    cell: Cell, repeats: Sequence[Repeat], suffix_tokens: Mapping[str, int]
) -> list[CellRow]:
    """A row for each mode: medians over the repeats, and percentiles of all single requests.

    `suffix_tokens`: the tokens that a rule adds to the prompt, by mode.
    """
    rows = []
    for mode in repeats[0].samples:
        samples = [repeat.samples[mode] for repeat in repeats if mode in repeat.samples]
        rows.append(_cell_row(cell, mode, samples, suffix_tokens[mode]))
    return rows


def _cell_row(
    cell: Cell, mode: str, samples: Sequence[LatencySample], suffix_tokens: int
) -> CellRow:
    latencies_ms: list[float] = []
    for sample in samples:
        latencies_ms += sample.latencies_ms
    return CellRow(
        prompt_tokens=cell.prompt_tokens,
        suffix_tokens=suffix_tokens,
        rules=cell.rules,
        mode=mode,
        wall_ms=Spread.of([sample.wall_ms for sample in samples], with_p95=True),
        engine_ms=statistics.median(sample.engine_ms for sample in samples),
        mean_ms=float(np.mean(latencies_ms)),
        **percentiles(latencies_ms),
        cached_tokens=median_count([sample.cached_tokens for sample in samples]),
        computed_tokens=median_count([sample.computed_tokens for sample in samples]),
        swap_ins=max(sample.swap_ins for sample in samples),
        repeats=len(samples),
    )


def ratio_row(cell: Cell, repeats: Sequence[Repeat]) -> RatioRow:
    """The ratios, each taken within a repeat, and the lower bound.

    They compare the first method that prefills the conversation for every rule, as LoRA does, with
    the first that shares it, as aLoRA does.
    """
    bounds = [repeat.lower_bound for repeat in repeats]
    repeating = method_that_repeats(repeats[0].samples)
    sharing = method_that_shares(repeats[0].samples)
    speedups, over_bound, engine_over_bound = [], [], []
    for repeat in repeats:
        lora, alora = repeat.samples.get(repeating or ""), repeat.samples.get(sharing or "")
        if alora is not None:
            over_bound.append(alora.wall_ms / repeat.lower_bound.wall_ms)
            engine_over_bound.append(alora.engine_ms / repeat.lower_bound.engine_ms)
        if lora is not None and alora is not None:
            speedups.append(lora.wall_ms / alora.wall_ms)
    over_bound_median = None
    if over_bound:
        over_bound_median = statistics.median(over_bound)
    return RatioRow(
        prompt_tokens=cell.prompt_tokens,
        rules=cell.rules,
        lora_over_alora=_spread(speedups),
        needed_tokens=median_count([repeat.needed_tokens for repeat in repeats]),
        lower_bound_ms=statistics.median(bound.wall_ms for bound in bounds),
        lower_bound_engine_ms=statistics.median(bound.engine_ms for bound in bounds),
        lower_bound_measured_tokens=median_count([bound.measured_tokens for bound in bounds]),
        alora_over_lower_bound=over_bound_median,
        alora_engine_over_lower_bound=_spread(engine_over_bound),
    )


def _spread(ratios: Sequence[float]) -> Spread | None:
    """The spread of the ratios; None where nothing was measured."""
    if not ratios:
        return None
    return Spread.of(ratios)


def marginal_costs(measured: Mapping[Cell, Sequence[Repeat]]) -> list[MarginalCostRow]:
    """The costs of a further rule between neighbouring numbers of rules, on conversations of one
    length, repeat by repeat.
    """
    cells = sorted(measured, key=lambda cell: (cell.prompt_tokens, cell.rules))
    rows = []
    for few, many in pairwise(cells):
        sharing = method_that_shares(measured[few][0].samples)
        if few.prompt_tokens == many.prompt_tokens and sharing is not None:
            rows.append(_marginal_cost(sharing, few, many, measured))
    return rows


def _marginal_cost(
    method: str, few: Cell, many: Cell, measured: Mapping[Cell, Sequence[Repeat]]
) -> MarginalCostRow:
    costs = []
    # Repeats with the same number have nearly the same length.
    for with_few, with_many in zip(measured[few], measured[many], strict=False):
        growth_ms = with_many.samples[method].wall_ms - with_few.samples[method].wall_ms
        costs.append(growth_ms / (many.rules - few.rules))
    low, high = _median_interval(costs)
    return MarginalCostRow(
        prompt_tokens=few.prompt_tokens,
        from_rules=few.rules,
        to_rules=many.rules,
        ms_per_rule=statistics.median(costs),
        ms_low=low,
        ms_high=high,
        pairs=len(costs),
    )


def _median_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % interval of the values' median; of too few values there is none."""
    if len(values) < FEWEST_PAIRS:
        return None, None
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), INTERVAL)
    return float(low), float(high)
