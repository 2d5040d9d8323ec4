"""What every benchmark's report has: where its numbers come from, and how it is kept. Knows nothing of what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict


class BenchReport(Strict):
    """A JSON file of measurements, all from one run."""

    commit: str
    hardware: str
    versions: dict[str, str]
    model: str
    peak_memory_mib: float  # resident, of the process that measured; of several, the largest

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(
                json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8"
            )


Report = TypeVar("Report", bound=BenchReport)


def publish(
    report: Report, path: Path, draw: Callable[[Report, Path], None], table: Callable[[Report], str]
) -> None:
    """Write the report to `path` and its plot beside it, and print the table."""
    report.save(path)
    draw(report, path.with_suffix(".png"))
    print(table(report))
    print(f"peak memory: {report.peak_memory_mib:,.0f} MiB")
    print(f"written: {path}, {path.with_suffix('.png')}")
