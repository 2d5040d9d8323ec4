"""A race to watch: one conversation against many rules, by LoRA and by aLoRA.

All methods of the recipe that are adapters run in one engine, one after the other. Each starts with
an empty prefix cache and has as many adapters as there are rules: one with random weights, loaded
again under other names. The terminal and the animated `race.svg` show the times of this one run,
which are in `race.json`. In the picture the cells of two lanes fill at the measured times,
over and over: SMIL animates it, so it moves inside an <img> too. A viewer that does not animate
shows the end of the race. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from html import escape

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from serve.bench.engines import scores_of
from serve.bench.harness import BenchCommand, add_count
from serve.bench.plot import BLUE, VERMILION
from serve.bench.report import BenchReport, engine_settings, origin
from serve.bench.workload.adapters import MARGIN_TOKENS, random_copies
from serve.bench.workload.prompts import conversation, wordings
from serve.engine import GuardEngine, ScoreRequest

TOKENS, RULES = 1000, 100
QUICK_RULES = 10
SEED = 1  # of the conversation; the warm-up has another one
WARM_UP_SEED, WARM_UP_TOKENS = 2, 100
REFRESH_S = 0.1  # at least so long between two drawings: drawing takes time from the race
LONGEST_S = 15.0  # the longest animation; a longer race is shown faster
HOLD_S = 4.0  # how long the end stays before the race begins again
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
        times = [f"{lane.label} {duration(lane.finish_s)}" for lane in self.lanes]
        return f"{', '.join(times)}: {self.speedup}"

    @property
    def caption(self) -> str:
        return (
            f"One conversation of {self.conversation_tokens:,} tokens, {self.rules} rules, "
            f"adapters with random weights, empty cache, one run each; {self.source}"
        )


def duration(seconds: float) -> str:
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
        asked = f"One conversation of {report.conversation_tokens:,} tokens, {report.rules} rules"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            _text(MARGIN, 34, f"{asked}: a cell for each verdict", "font-size:18px"),
        ]
        for number, lane in enumerate(report.lanes):
            x = MARGIN + number * (LANE_WIDTH + BETWEEN)
            parts += self._lane(lane, x, COLOURS[number % len(COLOURS)])
        parts.append(self._result(grid_bottom + 36))
        for number, line in enumerate(footer):
            y = grid_bottom + 68 + FOOTER_LINE * number
            parts.append(f'<text class="small" x="{MARGIN}" y="{y}">{escape(line)}</text>')
        return "\n".join([*parts, "</svg>\n"])

    def _time_scale(self) -> str:
        if self.speed == 1.0:
            return "Shown in real time."
        return f"Shown {self.speed:.1f} times as fast as measured."

    def _lane(self, lane: Lane, x: int, colour: str) -> list[str]:
        """Label, time, empty cells, and the cells of each moment at which verdicts came."""
        style = f"font-size:22px;font-weight:600;fill:{colour}"
        empty = _cells(range(len(lane.verdict_s)), x)
        parts = [_text(x, TOP - 22, lane.label, style), f'<path class="empty" d="{empty}"/>']
        for moment in sorted(set(lane.verdict_s)):
            cells = [rule for rule, verdict_s in enumerate(lane.verdict_s) if verdict_s == moment]
            animation = self._animation(moment)
            parts.append(f'<path fill="{colour}" d="{_cells(cells, x)}">{animation}</path>')
        clock = f"{duration(lane.finish_s)}{self._animation(lane.finish_s)}"
        place = f'class="clock" x="{x + LANE_WIDTH}" y="{TOP - 22}" text-anchor="end"'
        return [*parts, f"<text {place}>{clock}</text>"]

    def _result(self, y: int) -> str:
        """The ratio, from the end of the race on."""
        slowest_s = max(lane.finish_s for lane in self._report.lanes)
        fastest = min(self._report.lanes, key=lambda lane: lane.finish_s)
        animation = self._animation(slowest_s)
        text = f"{fastest.label} is {self._report.speedup} as fast"
        style = "font-size:22px;font-weight:600"
        return f'<text x="{MARGIN}" y="{y}" style="{style}">{escape(text)}{animation}</text>'

    def _animation(self, race_s: float) -> str:
        """Appear at this moment of the race, in every cycle."""
        share = race_s / self.speed / self.cycle_s
        return (
            f'<animate attributeName="opacity" values="0;1" keyTimes="0;{share:.5f}" '
            f'calcMode="discrete" dur="{self.cycle_s:.3f}s" repeatCount="indefinite"/>'
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


class RaceBench(BenchCommand):
    """The race."""

    name = "race"
    summary = "live: one conversation against 100 rules, LoRA beside aLoRA; draws an SVG"
    duration = "2 min"
    _engine: GuardEngine
    _names: Mapping[str, Sequence[str]]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        add_count(parser, "--rules", RULES, "number of rules that the conversation is put to")
        add_count(parser, "--tokens", TOKENS, "tokens of the conversation")

    def main(self) -> None:
        report = self.race()
        report.save(self.runs.root / "race.json")
        picture = self.runs.root / "race.svg"
        with atomic_write(picture) as part:
            part.write_text(RacePicture(report).svg(), encoding="utf-8")
        print(report.result)
        print(report.caption)
        print(f"written: {self.runs.root / 'race.json'}, {picture}")

    def race(self) -> RaceReport:
        """Race all methods, the first one first."""
        rules, tokens = self.options.rules, self.options.tokens
        if self.options.quick:
            rules = min(rules, QUICK_RULES)
        self._prompts = PromptBuilder.of(self.recipe)
        arguments = {"max_model_len": max(self.recipe.context_tokens, tokens + MARGIN_TOKENS)}
        with contextlib.ExitStack() as stack:
            self._names, adapters = stack.enter_context(random_copies(self.recipe, rules))
            print(f"loading {self.recipe.name} with {len(adapters)} adapters", flush=True)
            engine = GuardEngine(self.recipe, adapters, max_loras=len(adapters), **arguments)
            self._engine = stack.enter_context(engine)
            for method in self._names:  # every adapter, and a full step: at first all is slow
                self._engine.score(self._requests(method, WARM_UP_TOKENS, WARM_UP_SEED, rules))
                self._engine.score(self._requests(method, tokens, WARM_UP_SEED, 1))
            columns = TextColumn("{task.description:<6}"), BarColumn(), MofNCompleteColumn()
            with Progress(*columns, TimeElapsedColumn(), auto_refresh=False) as progress:
                lanes = [self._run(method, tokens, rules, progress) for method in self._names]
        return RaceReport(
            **origin(self.recipe),
            conversation_tokens=tokens,
            rules=rules,
            engine=engine_settings(self.recipe),
            lanes=tuple(lanes),
        )

    def _run(self, method: str, tokens: int, rules: int, progress: Progress) -> Lane:
        """Put a conversation to all rules, uncached. Raises GuardError if one is refused."""
        requests = self._requests(method, tokens, SEED, rules)
        task = progress.add_task(METHODS[method].label, total=rules)
        self._engine.forget()
        verdict_s: dict[int, float] = {}
        shown_s = 0.0
        started = time.perf_counter()
        call = self._engine.submit(requests)
        while not call.done:
            self._engine.step()
            elapsed_s = time.perf_counter() - started
            for number, outcome in enumerate(call.outcomes):
                if outcome is not None:
                    verdict_s.setdefault(number, elapsed_s)
            is_due = elapsed_s - shown_s >= REFRESH_S or call.done
            progress.update(task, completed=len(verdict_s), refresh=is_due)
            if is_due:
                shown_s = elapsed_s
        scores = scores_of(call.results(), where=method)
        return Lane(
            method=method,
            verdict_s=tuple(verdict_s[number] for number in range(rules)),
            computed_tokens=sum(score.computed_tokens for score in scores),
        )

    def _requests(self, method: str, tokens: int, seed: int, rules: int) -> list[ScoreRequest]:
        messages = conversation(self._prompts, tokens, seed)
        names = self._names[method][:rules]
        texts = [self._engine.rules[name].rule_text for name in names]
        if all(texts):
            texts = wordings(list(dict.fromkeys(texts)), rules)
        return [ScoreRequest(messages, text, name) for text, name in zip(texts, names, strict=True)]
