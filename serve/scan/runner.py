"""Runs a scan in this process, or by the actors of a cluster.

Knows nothing of command lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from guard.machine.neighbours import warn_if_busy
from serve.scan.manifest import ScanManifest
from serve.scan.parts import PartFolder
from serve.scan.scan import scan
from serve.selection import ServedPart, open_engines


def judge_all(
    parts: Sequence[ServedPart], folder: PartFolder, actors: int | None = None
) -> ScanManifest:
    """Scan in this process, or by `actors` actors of a cluster; the finished manifest.

    Raises GuardError as `scan` and `scan_on_cluster` do, and for rules that were trained again
    meanwhile.
    """
    manifest = folder.manifest
    warn_if_busy("it may take several times as long")
    if actors is not None:
        from serve.scan.cluster import scan_on_cluster  # which imports Ray

        print(f"{actors} actors load {manifest.model} with {len(manifest.rules)} rules", flush=True)
        return scan_on_cluster(partial(open_engines, parts), folder, actors)
    print(f"loading {manifest.model} with {len(manifest.rules)} rules", flush=True)
    with open_engines(parts) as engine:
        manifest.check_served(engine.rules)
        return scan(engine, folder)
