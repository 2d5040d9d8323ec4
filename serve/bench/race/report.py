"""The race's numbers: `runs/race.json`. Knows nothing of engines, terminals or pictures."""

from __future__ import annotations

from guard.files.yaml_file import Strict
from guard.method import METHODS
from serve.bench.report import BenchReport, source


class Lane(Strict):
    """One method's side, in the order of the rules. Times are from the submission of all rules.

    `violations`: whether each rule is violated.
    """

    method: str
    verdict_s: tuple[float, ...]
    violations: tuple[bool, ...]
    computed_tokens: int

    @property
    def label(self) -> str:
        """The method's name."""
        return METHODS[self.method].label

    @property
    def finish_s(self) -> float:
        """The time of the last verdict."""
        return max(self.verdict_s)


class RaceReport(BenchReport):
    """Everything in `runs/race.json`."""

    adapters: str  # "trained" or "random weights"
    conversation_tokens: int
    rules: int
    engine: dict[str, str]
    lanes: tuple[Lane, ...]  # in the order in which they ran

    @property
    def result(self) -> str:
        """The times of all lanes and the speedup, in one line."""
        times = [f"{lane.label} {duration(lane.finish_s)}" for lane in self.lanes]
        return f"{', '.join(times)}: {speedup(self)}"


def speedup(report: RaceReport) -> str:
    """How many times as fast as the slowest lane the fastest was, for example `60x`."""
    finishes = [lane.finish_s for lane in report.lanes]
    ratio = max(finishes) / min(finishes)
    if ratio < 10:
        return f"{ratio:.1f}x"
    return f"{ratio:.0f}x"


def duration(seconds: float) -> str:
    """The duration as text, for example `0.24 s` or `13.8 s`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s"


def caption(report: RaceReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"One conversation of {report.conversation_tokens:,} tokens, {report.rules} rules, "
        f"{report.adapters} adapters, empty cache, one run each; {source(report)}"
    )
