"""A soak: the server at a steady load for a long time. Does its memory grow? Do its answers become
slower?

Saturation is measured first. Then windows of a minute follow one another, each with Poisson
arrivals of conversations that the server has not seen, at a share of saturation. A window begins
when all checks of the one before are answered. The first windows warm up; growth and slowing after
them come with time. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tqdm import tqdm

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count, add_option
from serve.bench.http.server import RunningServer, random_runs, server_process
from serve.bench.http.traffic import OpenLoopTraffic
from serve.bench.plot import BLUE, GREEN, VERMILION, new_figure, save_figure
from serve.bench.report import (
    BenchReport,
    notes,
    origin,
    peak_of_processes_mib,
    publish,
    source,
)
from serve.bench.workload.arrivals import RULES

MINUTES = 60
SHARE = 0.7  # of saturation
WINDOW_S = 60.0
WARM_UP = 5  # windows
DEADLINE_S = 5.0
THIRDS = 3


class SoakWindow(Strict):
    """One window: the latencies of its answered checks (None without any), and the server's memory
    at its end.
    """

    minute: int
    checks: int
    answered: int
    shed: int  # 503
    failed: int  # other statuses, or no answer
    p50_ms: float | None
    p95_ms: float | None
    memory_mib: float


class SoakReport(BenchReport):
    """Everything in `runs/soak_bench.json`."""

    saturation_per_second: float
    share: float
    deadline_s: float
    warm_up: int  # windows that are not judged
    windows: tuple[SoakWindow, ...]
    ended_by: str | None = None  # the error that ended it early

    @property
    def judged(self) -> tuple[SoakWindow, ...]:
        """The windows after those that warm up."""
        return self.windows[self.warm_up :]

    def growth(self, quantity: str) -> float | None:
        """The growth of a quantity: its median in the last third of the judged windows that have
        it, over its median in the first third. None if no window has it.
        """
        values = [getattr(window, quantity) for window in self.judged]
        values = [value for value in values if value is not None]
        if not values:
            return None
        third = max(1, len(values) // THIRDS)
        return float(statistics.median(values[-third:]) / statistics.median(values[:third]))


def run(
    recipe: Recipe,
    *,
    windows: int = MINUTES,
    window_s: float = WINDOW_S,
    share: float = SHARE,
    warm_up: int = WARM_UP,
) -> SoakReport:
    """Soak a server in a process of its own.

    The windows before an error are reported. Raises GuardError for an error in the first window,
    and for too few windows to measure growth.
    """
    if windows - warm_up < THIRDS:
        remedy = f"Ask for at least {warm_up + THIRDS}: {warm_up} of them warm up"
        raise GuardError("too few minutes", got=windows, remedy=remedy)
    soaked: list[SoakWindow] = []
    ended_by: str | None = None
    with (
        random_runs(recipe, RULES[1]) as runs,
        server_process(recipe, runs) as server,
        tqdm(desc="soak", unit="check") as bar,
    ):
        traffic = OpenLoopTraffic(recipe, server.address, bar)
        saturation = traffic.saturation()
        rate = share * saturation
        for minute in range(windows):
            try:
                soaked.append(_window(traffic, server, minute, rate, round(rate * window_s)))
            except GuardError as error:
                if not soaked:
                    raise
                ended_by = str(error)
                break
            bar.set_postfix_str(f"{soaked[-1].memory_mib:,.0f} MiB, minute {minute + 1}/{windows}")
        peak_mib = peak_of_processes_mib()
    return SoakReport(
        **origin(recipe, peak_mib),
        saturation_per_second=saturation,
        share=share,
        deadline_s=DEADLINE_S,
        warm_up=min(warm_up, len(soaked) - 1),
        windows=tuple(soaked),
        ended_by=ended_by,
    )


def _window(
    traffic: OpenLoopTraffic, server: RunningServer, minute: int, rate: float, checks: int
) -> SoakWindow:
    """Measure one window. Raises GuardError if the server has ended."""
    run, _ = traffic.run(rate, checks, 100 + minute, DEADLINE_S)
    answered, shed = run.count(200), run.count(503)
    return SoakWindow(
        minute=minute,
        checks=checks,
        answered=answered,
        shed=shed,
        failed=checks - answered - shed,
        p50_ms=run.percentile_ms(50),
        p95_ms=run.percentile_ms(95),
        memory_mib=server.memory_mib(),
    )


def table(report: SoakReport) -> str:
    """The report as text."""
    windows = report.windows
    checks = sum(window.checks for window in windows)
    shed = sum(window.shed for window in windows)
    failed = sum(window.failed for window in windows)
    first, last = report.judged[0], report.judged[-1]
    lines = [
        f"{len(windows)} minutes at {report.share:.0%} of {report.saturation_per_second:.1f} "
        f"checks/s: {checks:,} checks, {shed} times 503, {failed} failed",
        f"  {'':<7}{'minute ' + str(first.minute + 1):>12}{'minute ' + str(last.minute + 1):>12}"
        f"{'growth':>9}",
    ]
    for label, quantity in (("p50 ms", "p50_ms"), ("p95 ms", "p95_ms"), ("MiB", "memory_mib")):
        before, after = _whole(getattr(first, quantity)), _whole(getattr(last, quantity))
        growth = report.growth(quantity)
        times = "-" if growth is None else f"{growth:.3f}x"
        lines.append(f"  {label:<7}{before:>12}{after:>12}{times:>9}")
    if report.ended_by is not None:
        lines.append(f"ENDED EARLY: {report.ended_by}")
    lines += notes(
        f"Growth: the median of the last third of the minutes over the first third's, without the "
        f"first {report.warm_up}, which warm up. MiB: resident, of the server's processes."
    )
    return "\n".join([*lines, caption(report)])


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def caption(report: SoakReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"Poisson arrivals over HTTP, real lengths, deadline {report.deadline_s:g} s; "
        f"{source(report)}; random aLoRAs."
    )


def draw(report: SoakReport, path: Path) -> None:
    """Write the plot: latencies and memory, minute by minute."""
    figure = new_figure(9, 4.2)
    left, right = figure.subplots(1, 2)
    minutes = [window.minute + 1 for window in report.windows]
    for name, colour in (("p50_ms", BLUE), ("p95_ms", VERMILION)):
        values = [getattr(window, name) for window in report.windows]
        left.plot(minutes, values, color=colour, label=name)
    left.set_ylabel("ms from arrival to the answer")
    left.set_ylim(bottom=0)
    left.legend()
    right.plot(minutes, [window.memory_mib for window in report.windows], color=GREEN)
    right.set_ylabel("MiB of the server")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("minute")
        axes.grid(linewidth=0.4, alpha=0.6)
    save_figure(figure, caption(report), path)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--minutes", MINUTES, "minutes of soaking")
    add_option(parser, "--share", SHARE, "the load, as a share of saturation", type=float)
    parser.add_argument("--quick", action="store_true", help="four minutes")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table.

    Raises GuardError, after the report is written, if an error ended the soak early.
    """
    windows, warm_up = arguments.minutes, WARM_UP
    if arguments.quick:
        windows, warm_up = 4, 1
    report = run(
        load_recipe(arguments.model), windows=windows, share=arguments.share, warm_up=warm_up
    )
    publish(report, arguments.runs / "soak_bench.json", table, draw)
    if report.ended_by is not None:
        remedy = "See the server's error above, and soak again"
        raise GuardError("the soak ended early", got=report.ended_by, remedy=remedy)
