"""A scan against the engine alone, by turns in one process.

Knows nothing of reports on disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from serve.bench.report import Spread, threads
from serve.bench.scan.report import ThroughputRow
from serve.scan.judge import judge
from serve.scan.manifest import ScanManifest
from serve.scan.parts import PartFolder
from serve.scan.reading import read_parts
from serve.scan.scan import scan
from serve.selection import ServedPart, start_engine

WARM_UP = 64  # conversations


def measure_throughput(
    parts: Sequence[ServedPart], manifest: ScanManifest, scratch: Path, repeats: int
) -> ThroughputRow:
    """Put the same conversations straight into an engine, and scan them on it, by turns.

    Raises GuardError if an engine does not start.
    """
    began = time.perf_counter()
    stored = [part.conversations for part in read_parts(manifest)]
    reading_s = time.perf_counter() - began
    readable = [row.messages for part in stored for row in part if not row.problem]
    rules = list(manifest.rules)
    engine_per_s: list[float] = []
    scan_per_s: list[float] = []
    with start_engine(parts) as engine:
        judge(engine, readable[:WARM_UP], rules)
        for turn in range(repeats):
            began = time.perf_counter()
            judge(engine, readable, rules)
            engine_per_s.append(len(readable) / (time.perf_counter() - began))
            folder = PartFolder(scratch / f"turn-{turn}", manifest)
            began = time.perf_counter()
            scan(engine, folder)
            scan_per_s.append(len(readable) / (time.perf_counter() - began))
    ratios = [ours / alone for ours, alone in zip(scan_per_s, engine_per_s, strict=True)]
    return ThroughputRow(
        conversations=len(readable),
        rows_a_part=manifest.rows_a_part,
        threads=threads(),
        engine_per_s=Spread.of(engine_per_s),
        scan_per_s=Spread.of(scan_per_s),
        ratio=Spread.of(ratios),
        reading_s=reading_s,
    )
