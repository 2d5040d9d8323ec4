"""The server over HTTP: what it adds to the engine, and open-loop load up to twice saturation.

Overhead: one engine in this process, asked directly and by `/v1/check`, in turns, each time with a
conversation that it has not seen. Load: the server in a process of its own. Saturation is the rate
at which it answers while more checks are under way than its engine takes at once; the offered rates
are shares of it. A check that is answered after its deadline is late. Knows nothing of what the
verdicts mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from guard.files.yaml_file import Strict
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count, add_option, add_parts
from serve.bench.http.load import HttpRun
from serve.bench.http.overhead import overhead
from serve.bench.http.server import random_runs, server_process
from serve.bench.http.traffic import SATURATING_CHECKS, OpenLoopTraffic
from serve.bench.plot import BLUE, GREEN, VERMILION, new_figure, save_figure
from serve.bench.report import (
    BenchReport,
    Spread,
    notes,
    origin,
    peak_of_processes_mib,
    publish,
    source,
)
from serve.bench.workload.arrivals import RULES

PARTS = ("overhead", "load")
TOKENS, OVERHEAD_RULES, REPEATS = 1000, 20, 30
CHECKS = 1200  # in a run: past saturation the queue needs time to fill
DEADLINE_S = 5.0
SHARES = (0.5, 0.7, 0.9, 1.1, 1.5, 2.0)  # of saturation
QUICK_SHARES = (0.5, 2.0)
QUICK_CHECKS, QUICK_REPEATS = 60, 8


class HttpOverhead(Strict):
    """The times of the same check by the engine and over HTTP."""

    rules: int
    tokens: int
    engine_ms: Spread
    http_ms: Spread

    @property
    def ratio(self) -> float:
        """The median over HTTP divided by the engine's."""
        return self.http_ms.median / self.engine_ms.median


class HttpLoadRow(Strict):
    """A run at a rate. Latencies are those of checks that have verdicts, from when each was due."""

    share: float  # of saturation
    offered_per_second: float
    goodput_per_second: float  # checks answered in time
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    answered: int
    shed: int  # 503
    late: int  # answered after the deadline, which counts from when a check was sent
    failed: int  # other statuses, or no answer


class HttpReport(BenchReport):
    """Everything in `runs/http_bench.json`; a part that was left out is None or empty."""

    overhead: HttpOverhead | None
    checks: int
    deadline_s: float
    saturation_per_second: float | None
    rates: tuple[HttpLoadRow, ...]


def load_rows(
    recipe: Recipe, shares: Sequence[float], checks: int, deadline_s: float
) -> tuple[float, list[HttpLoadRow], float]:
    """Measure saturation in checks a second, and a run at each share of it.

    Returns both, and the server's peak memory in MiB.
    """
    rows: list[HttpLoadRow] = []
    total = SATURATING_CHECKS + len(shares) * checks
    with (
        random_runs(recipe, RULES[1]) as runs,
        server_process(recipe, runs) as server,
        tqdm(total=total, desc="load", unit="check") as bar,
    ):
        traffic = OpenLoopTraffic(recipe, server.address, bar)
        saturation = traffic.saturation()
        for number, share in enumerate(shares):
            run, due_s = traffic.run(share * saturation, checks, 10 + number, deadline_s)
            rows.append(_row(run, share, due_s, deadline_s))
        peak_mib = peak_of_processes_mib()
    return saturation, rows, peak_mib


def _row(run: HttpRun, share: float, due_s: Sequence[float], deadline_s: float) -> HttpLoadRow:
    answered, shed, late = run.count(200), run.count(503), run.late(deadline_s)
    return HttpLoadRow(
        share=share,
        offered_per_second=len(due_s) / due_s[-1],
        goodput_per_second=(answered - late) / run.wall_s,
        p50_ms=run.percentile_ms(50),
        p95_ms=run.percentile_ms(95),
        p99_ms=run.percentile_ms(99),
        answered=answered,
        shed=shed,
        late=late,
        failed=len(run.sent) - answered - shed,
    )


def run(
    recipe: Recipe,
    parts: Sequence[str] = PARTS,
    *,
    checks: int = CHECKS,
    repeats: int = REPEATS,
    deadline_s: float = DEADLINE_S,
    shares: Sequence[float] = SHARES,
) -> HttpReport:
    """Measure the chosen parts."""
    measured: HttpOverhead | None = None
    saturation: float | None = None
    rows: list[HttpLoadRow] = []
    peak_mib = 0.0
    if "overhead" in parts:
        engine_ms, http_ms = overhead(recipe, OVERHEAD_RULES, TOKENS, repeats)
        measured = HttpOverhead(
            rules=OVERHEAD_RULES,
            tokens=TOKENS,
            engine_ms=Spread.of(engine_ms, with_p95=True),
            http_ms=Spread.of(http_ms, with_p95=True),
        )
    if "load" in parts:
        saturation, rows, peak_mib = load_rows(recipe, shares, checks, deadline_s)
    return HttpReport(
        **origin(recipe, peak_mib),
        overhead=measured,
        checks=checks,
        deadline_s=deadline_s,
        saturation_per_second=saturation,
        rates=tuple(rows),
    )


def table(report: HttpReport) -> str:
    """The report as text."""
    lines: list[str] = []
    measured = report.overhead
    if measured is not None:
        lines.append(f"{measured.rules} rules x {measured.tokens:,} tokens, ms")
        lines.append(f"engine {measured.engine_ms.text(1)}")
        lines.append(f"HTTP   {measured.http_ms.text(1)}, {measured.ratio:.3f}x")
    if report.rates:
        lines.append(f"saturation: {report.saturation_per_second:.1f} checks/s")
        lines.append(
            f"{'share':>6} {'offered/s':>9} {'goodput/s':>9} {'p50 ms':>8} {'p95 ms':>8} "
            f"{'p99 ms':>8} {'answered':>8} {'503':>5} {'late':>5} {'failed':>6}"
        )
        lines += [_line(row) for row in report.rates]
    lines += notes(
        "Latencies from when a check was due to its answer. Goodput: answered in time, over the",
        "run to its last answer. Late: answered after the deadline, from when it was sent.",
    )
    return "\n".join([*lines, caption(report)])


def _line(row: HttpLoadRow) -> str:
    line = f"{row.share:>6.2f} {row.offered_per_second:>9.1f} {row.goodput_per_second:>9.1f}"
    for value in (row.p50_ms, row.p95_ms, row.p99_ms):
        line += f" {'-' if value is None else f'{value:.0f}':>8}"
    return f"{line} {row.answered:>8} {row.shed:>5} {row.late:>5} {row.failed:>6}"


def caption(report: HttpReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"{report.checks} checks at each rate, Poisson arrivals over HTTP, real lengths, "
        f"deadline {report.deadline_s:g} s; {source(report)}; random aLoRAs."
    )


def draw(report: HttpReport, path: Path) -> None:
    """Write the plot: latencies, and goodput, against the offered load."""
    figure = new_figure(9, 4.2)
    left, right = figure.subplots(1, 2)
    rates = [row.offered_per_second for row in report.rates]
    for name, colour in (("p50_ms", BLUE), ("p95_ms", GREEN), ("p99_ms", VERMILION)):
        left.plot(
            rates, [getattr(row, name) for row in report.rates], "o-", color=colour, label=name
        )
    left.set_yscale("log")
    left.set_ylabel("ms from arrival to the answer")
    right.plot(rates, [row.goodput_per_second for row in report.rates], "o-", color=BLUE)
    right.set_ylabel("checks answered in time, per second")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("offered load: checks per second")
        axes.grid(linewidth=0.4, alpha=0.6)
    left.legend()
    save_figure(figure, caption(report), path)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_parts(parser, PARTS)
    add_count(parser, "--checks", CHECKS, "checks at each rate")
    add_count(parser, "--repeats", REPEATS, "pairs of calls for the overhead")
    add_option(parser, "--deadline", DEADLINE_S, "seconds that a check may take", type=float)
    parser.add_argument("--quick", action="store_true", help="few checks at two rates")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    shares: Sequence[float] = SHARES
    checks, repeats = arguments.checks, arguments.repeats
    if arguments.quick:
        shares, checks, repeats = QUICK_SHARES, QUICK_CHECKS, QUICK_REPEATS
    report = run(
        load_recipe(arguments.model),
        arguments.parts,
        checks=checks,
        repeats=repeats,
        deadline_s=arguments.deadline,
        shares=shares,
    )
    publish(report, arguments.runs / "http_bench.json", table, draw if report.rates else None)
