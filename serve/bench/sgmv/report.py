"""The SGMV microbenchmark's numbers: `runs/sgmv_bench.json` and the table in the terminal.

Knows nothing of operators.
"""

from __future__ import annotations

from guard.files.yaml_file import Strict
from serve.bench.report import BenchReport, Spread

OURS, LOOP, VLLMS = "ours", "loop over adapters", "vLLM's operator"


class SgmvRow(Strict):
    """One operator on one batch: the time of all low-rank products of a step."""

    batch: str
    operator: str
    ms: Spread
    lower_bound_ms: float
    weights_mib: float  # the adapters' weights, which have to be read once


class SgmvReport(BenchReport):
    """Everything in `runs/sgmv_bench.json`.

    `bandwidth_gb_s`: that of reading. `gflop_s`: that of a large product. Both are measured too.
    """

    rank: int
    layers: int
    dtype: str
    bandwidth_gb_s: float
    gflop_s: float
    repeats: int
    rows: tuple[SgmvRow, ...]


def table(report: SgmvReport) -> str:
    """The report as text."""
    width = max(len(row.batch) for row in report.rows)
    head = (
        f"{'batch':<{width}} | {'operator':<18} | {'ms a step (min to max)':>26} | "
        f"{'of lower bound':>14} | {'weights, MiB':>12}"
    )
    lines = [head, "-" * len(head)]
    previous = ""
    for row in report.rows:
        name = row.batch.removeprefix(previous)  # the name stands only once a batch
        previous = row.batch
        lines.append(
            f"{name:<{width}} | {row.operator:<18} | {row.ms.text(1):>26} | "
            f"{row.ms.median / row.lower_bound_ms:>13.1f}x | {row.weights_mib:>12.1f}"
        )
    return "\n".join([*lines, caption(report)])


def caption(report: SgmvReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"All low-rank products of a step of {report.model}, {report.layers} layers, adapters with "
        f"weights in every linear one, rank {report.rank}, {report.dtype}; lower bound (roofline): "
        f"reading the adapters' weights once at {report.bandwidth_gb_s:.0f} GB/s, or multiplying "
        f"at {report.gflop_s:.0f} GFLOP/s; {report.hardware}; commit {report.commit}; "
        f"median of {report.repeats}."
    )
