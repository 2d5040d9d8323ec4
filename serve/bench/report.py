"""What every benchmark's report has: where its numbers come from, spreads, and how it is kept.

Knows nothing of what was measured.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import psutil

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, validate
from guard.machine.device import usable_cores
from guard.machine.provenance import Provenance, peak_memory_mib, provenance
from guard.recipe import Recipe

NOTE_COLUMNS = 110
FEWEST_FOR_P95 = 20  # values: of fewer, less than one in the mean is above the 95th percentile
BENCH = Path(__file__).parent


class Spread(Strict):
    """A quantity that was measured several times: median, smallest and largest value.

    `p95`: None where a benchmark does not state it, or has measured too few values.
    """

    median: float
    min: float
    max: float
    p95: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], *, with_p95: bool = False) -> Self:
        """The spread of at least one value. Of fewer than FEWEST_FOR_P95 there is no p95."""
        p95 = None
        if with_p95 and len(values) >= FEWEST_FOR_P95:
            p95 = percentile(values, 95)
        median = float(statistics.median(values))
        return cls(median=median, min=float(min(values)), max=float(max(values)), p95=p95)

    def text(self, digits: int = 0, unit: str = "") -> str:
        """The spread as text: `157 (150 to 162)`, or with a unit `1.06x (1.00 to 1.21)`."""
        low, high = f"{self.min:.{digits}f}", f"{self.max:.{digits}f}"
        return f"{self.median:.{digits}f}{unit} ({low} to {high})"


class BenchReport(Strict):
    """A JSON file of measurements, all from one run."""

    commit: str
    hardware: str
    versions: dict[str, str]
    model: str
    peak_memory_mib: float  # resident, of the process that measured; of several, the largest

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file.

        Raises GuardError if it is not one of this version, OSError or ValueError if it is no JSON
        file.
        """
        return validate(json.loads(path.read_text(encoding="utf-8")), cls, where=path)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.model_dump(mode="json"), indent=1)
        with atomic_write(path) as part:
            part.write_text(content + "\n", encoding="utf-8")


SomeReport = TypeVar("SomeReport", bound=BenchReport)


@functools.cache
def started_from() -> Provenance:
    """The commit, hardware and versions of this process, as they are when it is first asked: a
    benchmark asks before it measures, because the checkout may be another one when it has.
    """
    return provenance()


def origin(recipe: Recipe, *other_peaks_mib: float) -> dict[str, Any]:
    """The fields that every report has. `other_peaks_mib`: the peak memory of other processes.

    Call it last, because the peak memory of this process is that so far.
    """
    peak_mib = max([peak_memory_mib(), *other_peaks_mib])
    return {**started_from(), "model": recipe.name, "peak_memory_mib": peak_mib}


def peak_of_processes_mib() -> float:
    """The largest peak memory among the running processes that this one has started.

    Ask before a server ends.
    """
    peak_mib = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has just ended
            peak_mib = max(peak_mib, peak_memory_mib(process.pid))
    return peak_mib


def threads() -> int:
    """The number of threads of an engine in this process, or in one that it starts."""
    return int(os.environ.get("OMP_NUM_THREADS", len(usable_cores())))


def engine_settings(recipe: Recipe) -> dict[str, str]:
    """The recipe's engine arguments, as reports keep them."""
    return {
        key: str(value) for key, value in (recipe.engine | {"dtype": recipe.serving_dtype}).items()
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linear between neighbouring values."""
    return float(np.percentile(values, percent))


def percentiles(latencies_ms: Sequence[float]) -> dict[str, Any]:
    """The fields p50_ms, p95_ms and p99_ms of a row."""
    return {f"p{percent}_ms": percentile(latencies_ms, percent) for percent in (50, 95, 99)}


def median_count(values: Sequence[int]) -> int:
    """The median of whole numbers, rounded."""
    return round(statistics.median(values))


def notes(*sentences: str) -> list[str]:
    """The sentences below a table, in lines of equal width."""
    return textwrap.wrap(" ".join(sentences), NOTE_COLUMNS)


def source(report: BenchReport) -> str:
    """Where the numbers come from, for a caption: `tiny on AMD EPYC, …; commit 1a2b3c4`."""
    return f"{report.model} on {report.hardware}; commit {report.commit}"


def publish(
    report: SomeReport,
    path: Path,
    table: Callable[[SomeReport], str],
    draw: Callable[[SomeReport, Path], None] | None = None,
) -> None:
    """Write the report to `path`, and its plot beside it if `draw` is given; print the table.

    Without `draw` no plot of an earlier report stays there.
    """
    written, plot = [path], path.with_suffix(".png")
    report.save(path)
    plot.unlink(missing_ok=True)
    if draw is not None:
        written.append(plot)
        draw(report, plot)
    print(table(report))
    print(f"peak memory: {report.peak_memory_mib:,.0f} MiB")
    print(f"written: {', '.join(map(str, written))}")


def shared_code() -> list[Path]:
    """The files that the benchmarks which keep their report measure with, besides their own folder
    and the engine.
    """
    files = [BENCH / name for name in ("memory.py", "report.py", "scores.py")]
    return [*files, *sorted((BENCH / "workload").glob("*.py"))]
