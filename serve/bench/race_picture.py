"""A race's numbers, `runs/race.json`, and its picture: two lanes whose cells fill at the measured
times, over and over.

SMIL animates it, so it moves inside an <img> too; a viewer that does not animate shows the end of
the race. Knows nothing of engines.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from guard.files.yaml_file import Strict
from guard.method import METHODS
from serve.bench.plot import BLUE, VERMILION
from serve.bench.report import BenchReport

LONGEST_S = 15.0  # the longest animation; a longer race is shown faster
HOLD_S = 4.0  # how long the end stays before the race begins again
FRAME_S = 0.1  # between two states of the clocks
COLUMNS = 20
CELL, GAP = 16, 4
LANE_WIDTH = COLUMNS * (CELL + GAP) - GAP
MARGIN, BETWEEN, TOP = 24, 48, 96
WIDTH = 2 * MARGIN + 2 * LANE_WIDTH + BETWEEN
FOOTER_COLUMNS = 130
FOOTER_LINE = 16
COLOURS = (BLUE, VERMILION)

# Readable on light and dark pages: only text and empty cells change their colour.
STYLE = """
text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.small{font-size:11px;fill:#59636e}
.clock{font-size:22px;font-variant-numeric:tabular-nums}
.empty{fill:#d1d9e0}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.small{fill:#9198a1}.empty{fill:#3d444d}}
"""


class Lane(Strict):
    """One method's side. Times are from the submission of all rules, in the order of the rules."""

    method: str
    verdict_s: tuple[float, ...]
    computed_tokens: int

    @property
    def label(self) -> str:
        return METHODS[self.method].label

    @property
    def finish_s(self) -> float:
        return max(self.verdict_s)


class RaceReport(BenchReport):
    """Everything in `runs/race.json`."""

    conversation_tokens: int
    rules: int
    engine: dict[str, str]
    lanes: tuple[Lane, ...]  # in the order in which they ran

    @property
    def speedup(self) -> str:
        """How many times as fast as the slowest lane the fastest was, for example `60x`."""
        finishes = [lane.finish_s for lane in self.lanes]
        ratio = max(finishes) / min(finishes)
        if ratio < 10:
            return f"{ratio:.1f}x"
        return f"{ratio:.0f}x"

    @property
    def result(self) -> str:
        """The times of all lanes and the speedup, in one line."""
        times = [f"{lane.label} {duration(lane.finish_s)}" for lane in self.lanes]
        return f"{', '.join(times)}: {self.speedup}"

    @property
    def caption(self) -> str:
        return (
            f"One conversation of {self.conversation_tokens:,} tokens, {self.rules} rules, "
            f"adapters with random weights, empty cache, one run each; {self.source}"
        )


def duration(seconds: float) -> str:
    """The duration as text, for example `0.24 s` or `13.8 s`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s"


class RacePicture:
    """The picture of a report. `speed`: seconds of the race in a second of the picture."""

    def __init__(self, report: RaceReport) -> None:
        self._report = report
        slowest_s = max(lane.finish_s for lane in report.lanes)
        self.speed = max(1.0, slowest_s / LONGEST_S)
        self.cycle_s = slowest_s / self.speed + HOLD_S

    def svg(self) -> str:
        """The file's content."""
        report = self._report
        rows = math.ceil(report.rules / COLUMNS)
        grid_bottom = TOP + rows * (CELL + GAP)
        footer = textwrap.wrap(f"{report.caption}. {self._time_scale()}", FOOTER_COLUMNS)
        height = grid_bottom + 72 + FOOTER_LINE * len(footer)
        title = f"{report.rules} rules on one conversation: {report.result}"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            _text(MARGIN, 34, self._heading(), "font-size:18px"),
        ]
        for number, lane in enumerate(report.lanes):
            x = MARGIN + number * (LANE_WIDTH + BETWEEN)
            parts += self._lane(lane, x, COLOURS[number % len(COLOURS)])
        parts.append(self._result(grid_bottom + 36))
        for number, line in enumerate(footer):
            y = grid_bottom + 68 + FOOTER_LINE * number
            parts.append(f'<text class="small" x="{MARGIN}" y="{y}">{escape(line)}</text>')
        return "\n".join([*parts, "</svg>\n"])

    def key_time(self, race_s: float) -> str:
        """A moment of the race as a share of the animation's cycle."""
        return f"{race_s / self.speed / self.cycle_s:.5f}"

    def _heading(self) -> str:
        tokens = f"{self._report.conversation_tokens:,} tokens"
        return f"One conversation of {tokens}, {self._report.rules} rules: a cell for each verdict"

    def _time_scale(self) -> str:
        if self.speed == 1.0:
            return "Shown in real time."
        return f"Shown {self.speed:.1f} times as fast as measured."

    def _lane(self, lane: Lane, x: int, colour: str) -> list[str]:
        """Label, clock, empty cells, and the cells of each moment at which verdicts came."""
        style = f"font-size:22px;font-weight:600;fill:{colour}"
        empty = _cells(range(len(lane.verdict_s)), x)
        parts = [_text(x, TOP - 22, lane.label, style), f'<path class="empty" d="{empty}"/>']
        for moment in sorted(set(lane.verdict_s)):
            cells = [rule for rule, verdict_s in enumerate(lane.verdict_s) if verdict_s == moment]
            animation = self._animation("opacity", ("0", "1"), (0.0, moment))
            parts.append(f'<path fill="{colour}" d="{_cells(cells, x)}">{animation}</path>')
        return parts + self._clock(lane, x + LANE_WIDTH)

    def _clock(self, lane: Lane, x: int) -> list[str]:
        """A text for each tenth of a second, one visible at a time, and the final time."""
        ticks = math.ceil(lane.finish_s / self.speed / FRAME_S)
        moments = [tick * FRAME_S * self.speed for tick in range(ticks)]
        parts = []
        for start, end in pairwise([*moments, lane.finish_s]):
            values, times = ["hidden", "visible", "hidden"], [0.0, start, end]
            if start == 0:
                values, times = values[1:], times[1:]
            animation = self._animation("visibility", values, times)
            parts.append(_clock_text(x, f"{start:.1f} s", "hidden", animation))
        animation = self._animation("visibility", ("hidden", "visible"), (0.0, lane.finish_s))
        return [*parts, _clock_text(x, duration(lane.finish_s), "visible", animation)]

    def _result(self, y: int) -> str:
        """The ratio, from the end of the race on."""
        slowest_s = max(lane.finish_s for lane in self._report.lanes)
        fastest = min(self._report.lanes, key=lambda lane: lane.finish_s)
        animation = self._animation("opacity", ("0", "1"), (0.0, slowest_s))
        text = f"{fastest.label} is {self._report.speedup} as fast"
        style = "font-size:22px;font-weight:600"
        return f'<text x="{MARGIN}" y="{y}" style="{style}">{escape(text)}{animation}</text>'

    def _animation(self, attribute: str, values: Sequence[str], race_s: Sequence[float]) -> str:
        """Jump to each of the values at its moment of the race, in every cycle."""
        times = ";".join(["0", *map(self.key_time, race_s[1:])])
        return (
            f'<animate attributeName="{attribute}" values="{";".join(values)}" '
            f'keyTimes="{times}" calcMode="discrete" dur="{self.cycle_s:.3f}s" '
            f'repeatCount="indefinite"/>'
        )


def _cells(numbers: Sequence[int], x: int) -> str:
    """The path of a lane's cells with these numbers, counted row by row; the lane is at `x`."""
    squares = []
    for number in numbers:
        row, column = divmod(number, COLUMNS)
        left, top = x + column * (CELL + GAP), TOP + row * (CELL + GAP)
        squares.append(f"M{left} {top}h{CELL}v{CELL}h-{CELL}z")
    return "".join(squares)


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" style="{style}">{escape(text)}</text>'


def _clock_text(x: int, text: str, visibility: str, animation: str) -> str:
    return (
        f'<text class="clock" x="{x}" y="{TOP - 22}" text-anchor="end" '
        f'visibility="{visibility}">{text}{animation}</text>'
    )
