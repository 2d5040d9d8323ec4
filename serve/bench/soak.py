"""A soak: the server in a process of its own, under open-loop load in windows of a minute.

Does its memory grow? Do its answers become slower? Saturation is measured first: the rate at which
the server answers while more checks are under way than its engine takes at once. Each window has
Poisson arrivals of conversations that the server has not seen, at a share of saturation (above 1:
what is answered in time, and what is shed?), and begins when all checks of the one before are
answered. Latencies are those of checks that have verdicts, from when each was due. The first
windows warm up; growth and slowing after them come with time. Knows nothing of what the verdicts
mean.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from guard.arguments import positive
from guard.errors import GuardError
from serve.bench.harness import Benchmark, Cell, Repeat, Sample, add_count
from serve.bench.plot import Panel
from serve.bench.report import Column, GridReport
from serve.bench.workload.server import OpenLoopTraffic, RunningServer, random_runs, server_process
from serve.bench.workload.traffic import RULES

MINUTES, WINDOW_S, WARM_UP = 60, 60.0, 5  # windows, of which so many warm up
QUICK_MINUTES, QUICK_WINDOW_S, QUICK_WARM_UP = 4, 10.0, 1
SHARE = 0.7  # of saturation
DEADLINE_S = 5.0
THIRDS = 3


@dataclass(frozen=True, kw_only=True)
class WindowCell(Cell):
    """A window at a share of saturation."""

    window: int
    share: float


class SoakBench(Benchmark[WindowCell]):
    """Steady load for a long time."""

    name = "soak"
    summary = "the server at 70 % of saturation for an hour: its memory and its latencies"
    duration = "1 h, --quick 1 min"
    line = ""
    is_resumable = False  # another server would go on
    columns = (
        Column("window", "window"),
        Column("share", "share"),
        Column("offered/s", "offered_per_second", 1),
        Column("in time/s", "goodput_per_second", 1),
        Column("ms", "check_ms"),
        Column("p95", "check_ms", part="p95"),
        Column("p99", "check_ms", part="p99"),
        Column("answered", "answered"),
        Column("503", "shed"),
        Column("late", "late"),
        Column("failed", "failed"),
        Column("MiB", "memory_mib"),
    )
    _server: RunningServer
    _traffic: OpenLoopTraffic
    _saturation: float

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        add_count(parser, "--minutes", MINUTES, "minutes of soaking")
        text = f"the load, as a share of saturation (default: {SHARE})"
        parser.add_argument("--share", default=SHARE, type=positive, help=text)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._minutes, self._window_s, self._warm_up = options.minutes, WINDOW_S, WARM_UP
        if options.quick:
            self._window_s, self._warm_up = QUICK_WINDOW_S, QUICK_WARM_UP
            self._minutes = min(self._minutes, QUICK_MINUTES)

    def cells(self) -> list[WindowCell]:
        """A window a minute. Raises GuardError for too few to measure growth."""
        if self._minutes - self._warm_up < THIRDS:
            remedy = f"Ask for at least {self._warm_up + THIRDS}: {self._warm_up} of them warm up"
            raise GuardError("too few minutes", got=self._minutes, remedy=remedy)
        share = self.options.share
        return [WindowCell(window=number, share=share) for number in range(self._minutes)]

    @contextlib.contextmanager
    def started(self, cells: Sequence[WindowCell]) -> Iterator[None]:
        with (
            random_runs(self.recipe, RULES[1]) as runs,
            server_process(self.recipe, runs) as self._server,
        ):
            self._traffic = OpenLoopTraffic(self.recipe, self._server.address)
            self._saturation = self._traffic.saturation()
            self.facts["saturation, checks a second"] = round(self._saturation, 2)
            self.facts["deadline, s"] = DEADLINE_S
            yield

    def measure(self, cell: WindowCell, repeat: Repeat) -> Sample:
        """Measure one window. Raises GuardError if the server has ended."""
        rate = cell.share * self._saturation
        checks = max(1, round(rate * self._window_s))
        run, due_s = self._traffic.run(rate, checks, 100 + cell.window, DEADLINE_S)
        answered, shed, late = run.count(200), run.count(503), run.late(DEADLINE_S)
        return {
            "offered_per_second": len(due_s) / due_s[-1],
            "goodput_per_second": (answered - late) / run.wall_s,
            "check_ms": [1000 * latency for latency in run.answered_s],
            "answered": answered,
            "shed": shed,
            "late": late,
            "failed": checks - answered - shed,
            "memory_mib": self._server.memory_mib(),
        }

    def growth(self, report: GridReport, quantity: str) -> float | None:
        """The growth of a quantity: its median in the last third of the windows that have it, over
        its median in the first third, without those that warm up. None if no window has it.
        """
        judged = report.rows[min(self._warm_up, len(report.rows) - 1) :]
        values = [row.median(quantity) for row in judged if quantity in row.measured]
        if not values:
            return None
        third = max(1, len(values) // THIRDS)
        return statistics.median(values[-third:]) / statistics.median(values[:third])

    def notes(self, report: GridReport) -> list[str]:
        sentences = ["Growth from the first third of the windows to the last, without the first"]
        sentences.append(f"{self._warm_up}, which warm up:")
        for name, quantity in (("latency", "check_ms"), ("memory", "memory_mib")):
            growth = self.growth(report, quantity)
            times = "not measured"
            if growth is not None:
                times = f"{growth:.3f}x"
            sentences.append(f"{name} {times};")
        return [
            *sentences,
            "ms, p95, p99: from when a check was due to its answer. in time: answered before the",
            "deadline, from when it was sent, over the run to its last answer. late: answered",
            "after it. MiB: resident, of the server's processes at the window's end.",
        ]

    def panels(self, report: GridReport) -> list[Panel]:
        rows = [row for row in report.rows if "check_ms" in row.measured]
        panels = [Panel(rows, "window", "check_ms", "", y_label="ms to the answer", is_log=False)]
        if not rows:
            panels = []
        memory = Panel(report.rows, "window", "memory_mib", "", y_label="MiB", is_log=False)
        return [*panels, memory]
