"""The load benchmark's numbers: `runs/load_bench.json` and the table in the terminal.

Knows nothing of engines.
"""

from __future__ import annotations

from guard.files.yaml_file import Strict
from guard.method import METHODS
from serve.bench.report import BenchReport, notes, source
from serve.bench.workload.arrivals import LENGTHS

SATURATED_GROWTH = 2.0
MEDIAN_LENGTH = LENGTHS[len(LENGTHS) // 2]


class LoadRow(Strict):
    """One method at one rate, over all runs.

    Latencies are from a conversation's arrival to its last verdict.

    `growth`: the median latency of the last third of a run's conversations over that of the first
    third, as the median over the runs.
    """

    method: str
    offered_per_second: float
    answered_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    growth: float
    verdicts: int
    computed_tokens: int
    needed_tokens: int
    swap_ins: int  # while the clock ran; every adapter has a slot of its own

    @property
    def is_saturated(self) -> bool:
        """Whether the queue grew for the whole run: more requests came than were answered."""
        return self.growth >= SATURATED_GROWTH


class LoadReport(BenchReport):
    """Everything in `runs/load_bench.json`."""

    checks: int
    repeats: int
    rules: tuple[int, int]
    engine: dict[str, str]
    rows: tuple[LoadRow, ...]


def table(report: LoadReport) -> str:
    """The report as text."""
    head = (
        f"{'offered/s':>9} {'method':>7} | {'answered/s':>10} {'p50 ms':>8} {'p95 ms':>8} "
        f"{'p99 ms':>8} {'growth':>6} | {'tokens/verdict':>14} {'of needed':>9} {'swap-ins':>8}"
    )
    lines = [head, "-" * len(head)]
    lines += [_line(row) for row in report.rows]
    lines += notes(
        "A request is a conversation with its rules.",
        "p50, p95, p99: from its arrival to its last verdict.",
        "growth: how much longer the last third of a run's requests waited than the first;",
        f"from {SATURATED_GROWTH:g} on the method is saturated.",
        "of needed: tokens computed over the needed ones (every conversation once, and every",
        "rule's suffix). swap-ins: adapters copied into a slot.",
    )
    return "\n".join([*lines, caption(report)])


def _line(row: LoadRow) -> str:
    line = (
        f"{row.offered_per_second:>9.1f} {METHODS[row.method].label:>7} | "
        f"{row.answered_per_second:>10.1f} {row.p50_ms:>8.0f} {row.p95_ms:>8.0f} "
        f"{row.p99_ms:>8.0f} {row.growth:>6.1f} | {row.computed_tokens / row.verdicts:>14.0f} "
        f"{row.computed_tokens / row.needed_tokens:>9.1%} {row.swap_ins:>8}"
    )
    if row.is_saturated:
        line += f"  saturated at {row.answered_per_second:.1f} requests/s"
    return line


def caption(report: LoadReport) -> str:
    """Where the numbers come from, in one line."""
    least, most = report.rules
    return (
        f"{report.repeats} runs of {report.checks} conversations at each rate, Poisson arrivals, "
        f"{LENGTHS[0]} to {LENGTHS[-1]} tokens (median {MEDIAN_LENGTH}), "
        f"{least} to {most} rules each; {source(report)}; random adapters."
    )
