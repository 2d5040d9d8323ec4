"""Shows a race while it runs: two grids that fill, or plain lines without a terminal.

Knows nothing of engines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from guard.method import METHODS
from serve.bench.race.report import duration

REFRESH_S = 0.1  # at least so long between two drawings: drawing takes time from the race
PLAIN_SHARE = 0.25  # without a terminal: a line for each quarter of the verdicts
GRID_COLUMNS = 20
CELL_LOOKS = {None: ("·", "dim"), False: ("■", "green"), True: ("■", "red")}


@dataclass
class LaneView:
    """One method's side so far: a verdict for each rule, None while there is none."""

    label: str
    verdicts: list[bool | None]
    elapsed_s: float = 0.0
    reported: int = field(default=0)  # verdicts when the last plain line was printed

    @property
    def done(self) -> int:
        """The number of verdicts so far."""
        return len(self.verdicts) - self.verdicts.count(None)

    def panel(self) -> Panel:
        """The grid with a progress bar and a clock."""
        grid = Text()
        for number, verdict in enumerate(self.verdicts):
            if number and number % GRID_COLUMNS == 0:
                grid.append("\n")
            symbol, style = CELL_LOOKS[verdict]
            grid.append(f"{symbol} ", style)
        bar = ProgressBar(total=len(self.verdicts), completed=self.done, width=2 * GRID_COLUMNS)
        clock = Text(f"{self.done} {self._progress()}")
        lines = Table.grid()
        for line in (grid, bar, clock):
            lines.add_row(line)
        return Panel(lines, title=self.label, expand=False)

    def line(self) -> str:
        """The progress in one line."""
        return f"{self.label:<6} {self.done:>4} {self._progress()}"

    def _progress(self) -> str:
        return f"of {len(self.verdicts)} verdicts, {duration(self.elapsed_s)}"


class RaceView:
    """The lanes side by side, as a context manager.

    Whoever measures calls `update` and `finish`.
    """

    def __init__(self, methods: Sequence[str], rules: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self.lanes: Mapping[str, LaneView] = {
            method: LaneView(METHODS[method].label, [None] * rules) for method in methods
        }
        self._live = Live(self._picture(), console=self._console, auto_refresh=False)
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._live.stop()

    def update(self, method: str, verdicts: Sequence[bool | None], elapsed_s: float) -> None:
        """Take a lane's verdicts, and show them unless it was shown a moment ago."""
        lane = self.lanes[method]
        lane.verdicts, lane.elapsed_s = list(verdicts), elapsed_s
        now = time.perf_counter()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            self._show(lane)

    def finish(self, method: str, verdicts: Sequence[bool], elapsed_s: float) -> None:
        """Show a lane's end."""
        self._shown_at = 0.0
        self.update(method, verdicts, elapsed_s)

    def _show(self, lane: LaneView) -> None:
        if self._is_live:
            self._live.update(self._picture(), refresh=True)
            return
        due = min(lane.reported + PLAIN_SHARE * len(lane.verdicts), len(lane.verdicts))
        if lane.done >= due and lane.done > lane.reported:
            lane.reported = lane.done
            self._console.print(lane.line(), highlight=False)

    def _picture(self) -> Columns:
        return Columns([lane.panel() for lane in self.lanes.values()])
