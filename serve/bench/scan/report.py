"""The measurements of a scan, as a file and as a table. Knows nothing of how they were made."""

from __future__ import annotations

from guard.files.yaml_file import Strict
from serve.bench.report import BenchReport, Spread, notes


class KilledRow(Strict):
    """A scan that was killed again and again against one that was not.

    `kills_before_judging`: those of the `kills` that came before a new part was written.
    `missing_rows`, `extra_rows`: rows that only one of the two outputs has; `repeated_rows`: those
    that the killed scan's output has once more. `different_rows` are in both outputs, with other
    verdicts or probabilities. Files are those of the scan that was not killed.
    """

    conversations: int
    rows_a_part: int
    kills: int
    kills_before_judging: int
    whole_s: float
    rows: int
    identical_files: int
    files: int
    missing_rows: int
    extra_rows: int | None = None  # older reports do not state them
    repeated_rows: int
    different_rows: int
    largest_change: float  # in a probability of rows in both outputs


class ThroughputRow(Strict):
    """Conversations a second, engine and scan by turns.

    The engine gets conversations in memory and keeps its answers there.
    """

    conversations: int
    rows_a_part: int
    threads: int
    engine_per_s: Spread
    scan_per_s: Spread
    ratio: Spread  # scan over engine, in each turn
    reading_s: float  # the time to read all sources, without judging


class ClusterRow(Strict):
    """A scan by `actors` (0: without Ray), from the beginning of its first part to the end of its
    last.

    `idle_ms`: the time of actors between two parts, for each conversation. `start_s`: the time
    before the first part, including that of engines to start.
    """

    actors: int
    conversations: int
    rows_a_part: int
    threads: int  # in each engine
    per_s: float
    idle_ms: float
    start_s: float


class ScanReport(BenchReport):
    """Everything in `runs/scan_bench.json`; what was not measured is None, or empty."""

    rules: int
    killed: KilledRow | None = None
    throughput: ThroughputRow | None = None
    cluster: tuple[ClusterRow, ...] = ()


def table(report: ScanReport) -> str:
    """The report as text."""
    lines = [f"{report.rules} random aLoRAs on stored conversations of mixed lengths:"]
    if report.throughput is not None:
        lines += _throughput_lines(report.throughput)
    if report.killed is not None:
        lines += _killed_lines(report.killed)
    if report.cluster:
        lines.append("  actors  threads each  conversations/s  idle a conversation   start")
        lines += [_cluster_line(row) for row in report.cluster]
    lines += notes(
        "engine: the same conversations in memory, as many open at once, nothing read or written. "
        "0 actors: a scan without Ray. idle: of an actor between two parts."
    )
    return "\n".join(lines)


def _throughput_lines(row: ThroughputRow) -> list[str]:
    return [
        f"  {row.conversations:,} conversations by turns, conversations a second, "
        f"{row.threads} threads:",
        f"    engine {row.engine_per_s.text(1)}, scan {row.scan_per_s.text(1)}, "
        f"ratio {row.ratio.text(3)}; reading alone {row.reading_s:.1f} s",
    ]


def _killed_lines(row: KilledRow) -> list[str]:
    extra = ""
    if row.extra_rows is not None:
        extra = f"{row.extra_rows} beside them, "
    return [
        f"  {row.conversations:,} conversations, {row.kills} times killed "
        f"({row.kills_before_judging} before a new part was written), {row.rows_a_part} a part:",
        f"    {row.identical_files} of {row.files} files byte for byte those of a scan that was "
        f"not; of {row.rows:,} rows {row.missing_rows} missing, {row.repeated_rows} repeated, "
        f"{extra}{row.different_rows} different (probabilities by at most "
        f"{row.largest_change:.2g})",
    ]


def _cluster_line(row: ClusterRow) -> str:
    return (
        f"  {row.actors:>6}{row.threads:>14}{row.per_s:>17.1f}{row.idle_ms:>18.2f} ms"
        f"{row.start_s:>6.0f} s"
    )
