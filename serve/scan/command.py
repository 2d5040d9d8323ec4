"""What `make scan` and `make replay` share: options, and a scan here or by a cluster's actors."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from guard.arguments import count
from guard.errors import GuardError
from guard.layout import Runs
from guard.machine.device import warn_if_busy
from serve.scan.parts import PartFolder, ScanManifest
from serve.scan.scan import scan
from serve.selection import ServedPart, open_engines

ROWS_A_PART = 1024  # the most that a kill costs; conversations are sorted within it


def add_scan_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options; `out` is the help of --out."""
    add = parser.add_argument
    add(
        "--files",
        required=True,
        help="files, folders and patterns separated by blanks (.jsonl, .jsonl.gz, .ndjson, "
        ".parquet), or hub:ORG/NAME",
    )
    add("--out", type=Path, help=out)
    rows = f"conversations per part (default: {ROWS_A_PART})"
    add("--rows-a-part", type=count, default=ROWS_A_PART, help=rows)
    add("--cluster", action="store_true", help="use actors of Ray Data, on RAY_ADDRESS or here")
    add("--actors", type=count, help="engines of the --cluster (default: 1)")
    add("--force", action="store_true", help="start over, whatever the folder holds")
    runs = "the folder of weights and results (default: %(default)s)"
    add("--runs", type=Path, default=Runs().root, help=runs)


def cluster_actors(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int | None:
    """The number of actors to scan with; None for a scan in this process.

    Ends the process for --actors without --cluster. Raises GuardError for a cluster without Ray.
    """
    if not arguments.cluster:
        if arguments.actors:
            parser.error("--actors needs --cluster (ACTORS= needs CLUSTER=1)")
        return None
    if importlib.util.find_spec("ray") is None:  # which imports nothing of it
        remedy = "`make scan CLUSTER=1` installs it; or scan without CLUSTER=1"
        raise GuardError("Ray is not installed", got="--cluster", remedy=remedy)
    return arguments.actors or 1


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
