"""A scan by actors of Ray Data on this machine, and without Ray.

Importing it imports Ray. Knows nothing of reports on disk.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from serve.bench.report import threads
from serve.bench.scan.report import ClusterRow
from serve.scan.cluster import JudgedPart, scan_on_cluster
from serve.scan.manifest import ScanManifest
from serve.scan.parts import PartFolder
from serve.scan.scan import scan
from serve.selection import ServedPart, start_engine


def measure_cluster(
    parts: Sequence[ServedPart], manifest: ScanManifest, scratch: Path, actors: int
) -> ClusterRow:
    """Measure a scan by `actors` actors on this machine; for 0, by an engine here without Ray.

    Raises GuardError as the scan does.
    """
    folder = PartFolder(scratch / f"actors-{actors}", manifest)
    began_s = time.time()
    judged: list[JudgedPart] = []
    if actors:
        finished = scan_on_cluster(partial(start_engine, parts), folder, actors, judged.append)
        first_s = min(part.began_s for part in judged)
        wall_s = max(part.ended_s for part in judged) - first_s
    else:
        with start_engine(parts) as engine:
            first_s = time.time()
            finished = scan(engine, folder)
            wall_s = time.time() - first_s
    return ClusterRow(
        actors=actors,
        conversations=finished.conversations,
        rows_a_part=manifest.rows_a_part,
        threads=max(1, threads() // max(1, actors)),
        per_s=finished.conversations / wall_s,
        idle_ms=1000 * idle_s(judged) / finished.conversations,
        start_s=first_s - began_s,
    )


def idle_s(judged: Sequence[JudgedPart]) -> float:
    """The seconds that actors were without a part, between two parts of theirs."""
    by_actor: dict[int, list[JudgedPart]] = defaultdict(list)
    for part in sorted(judged, key=lambda part: part.began_s):
        by_actor[part.actor].append(part)
    idle = 0.0
    for actor_parts in by_actor.values():
        for earlier, later in pairwise(actor_parts):
            idle += later.began_s - earlier.ended_s
    return idle
