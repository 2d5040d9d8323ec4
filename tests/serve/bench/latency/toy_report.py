"""A latency report with made-up times. Tests only."""

from __future__ import annotations

from collections.abc import Sequence

from serve.bench.latency.grid import Cell, full_grid
from serve.bench.latency.measure import LatencySample, LowerBound, Repeat
from serve.bench.latency.report import LatencyReport, MarginalCostRow
from serve.bench.latency.summary import cell_rows, ratio_row

COST = MarginalCostRow(
    prompt_tokens=1000, from_rules=1, to_rules=5, ms_per_rule=36.0, ms_low=30.0, ms_high=40.0
)


def toy_repeat(cell: Cell) -> Repeat:
    """LoRA takes 1 ms a token, aLoRA and the base share the conversation."""
    shared = cell.prompt_tokens + 30.0 * cell.rules
    every = cell.rules * cell.prompt_tokens
    latencies = (shared,) * cell.rules
    samples = {
        "base": LatencySample(shared, shared, latencies, 0, int(shared), 0),
        "lora": LatencySample(every, 1.0, (1.0,) * cell.rules, 0, every, 0),
        "alora": LatencySample(1.2 * shared, shared, latencies, 0, int(shared), 2),
    }
    return Repeat(samples, int(shared), LowerBound(shared, shared, min(int(shared) - 1, 4000)))


def toy_report(
    adapters: str = "trained",
    left_out: tuple[str, ...] = (),
    grid: Sequence[Cell] = tuple(full_grid(2)),
    inputs: str = "inputs",
    base_suffix_tokens: int = 30,
) -> LatencyReport:
    """A report of a grid."""
    suffix_tokens = {"base": base_suffix_tokens, "lora": 30, "alora": 30}
    rows, ratios = [], []
    for cell in grid:
        repeats = [toy_repeat(cell)] * cell.repeats
        rows += cell_rows(cell, repeats, suffix_tokens)
        ratios.append(ratio_row(cell, repeats))
    return LatencyReport(
        commit="abc1234",
        hardware="two cores",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        model="tiny",
        peak_memory_mib=2345.6,
        adapters=adapters,  # type: ignore[arg-type]
        inputs=inputs,
        engine={"block_size": "32"},
        left_out=left_out,
        cells=tuple(rows),
        ratios=tuple(ratios),
        marginal_costs=(COST,),
    )
