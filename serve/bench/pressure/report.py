"""The pressure benchmark's numbers: `runs/pressure_bench.json` and the table in the terminal.

Knows nothing of engines.
"""

from __future__ import annotations

from guard.files.yaml_file import Strict
from serve.bench.pressure.work import Order
from serve.bench.report import BenchReport, Spread, notes, source


class PressureRow(Strict):
    """One engine in one round.

    Latencies are those of the conversations of all repeats, from the moment when all were
    submitted.
    """

    round: str
    slots: int  # adapters on the device at once
    order: Order
    demand: float  # tokens of all conversations over those the cache holds
    cache_tokens: int
    verdicts_per_second: Spread
    p50_ms: float
    p95_ms: float
    computed_tokens: int
    needed_tokens: int
    swap_ins: int  # copied into a slot
    adapter_mib: float


class PressureReport(BenchReport):
    """Everything in `runs/pressure_bench.json`.

    `new_tokens`: the length of the turn with which a conversation comes again.
    """

    conversations: int
    conversation_tokens: int
    new_tokens: int
    rules: int
    repeats: int
    engine: dict[str, str]
    rows: tuple[PressureRow, ...]


def table(report: PressureReport) -> str:
    """The report as text."""
    head = (
        f"{'round':<5} {'slots':>5} {'order':>11} {'demand':>6} {'cache, tokens':>13} | "
        f"{'verdicts/s (min to max)':>24} {'p50 ms':>8} {'p95 ms':>8} | "
        f"{'computed':>9} {'of needed':>9} | {'swap-ins':>8} {'MiB':>5}"
    )
    lines = [head, "-" * len(head)]
    lines += [_line(row) for row in report.rows]
    lines += notes(
        "p50, p95: from the submission of all to a conversation's last verdict.",
        "of needed: tokens computed over the needed ones, which were not put to the engine before.",
        "swap-ins: adapters copied into a slot.",
        "order: first those conversations of which the cache holds more, or FCFS.",
    )
    return "\n".join([*lines, caption(report)])


def _line(row: PressureRow) -> str:
    return (
        f"{row.round:<5} {row.slots:>5} {row.order:>11} {row.demand:>5.1f}x "
        f"{row.cache_tokens:>13,} | {row.verdicts_per_second.text(1):>24} "
        f"{row.p50_ms:>8.0f} {row.p95_ms:>8.0f} | {row.computed_tokens:>9,} "
        f"{row.computed_tokens / row.needed_tokens:>9.1%} | "
        f"{row.swap_ins:>8} {row.swap_ins * row.adapter_mib:>5.0f}"
    )


def caption(report: PressureReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"{report.conversations} conversations of {report.conversation_tokens:,} tokens at once, "
        f"{report.rules} rules each, then again with {report.new_tokens} more; {source(report)}; "
        f"random adapters; median of {report.repeats} repeats."
    )
