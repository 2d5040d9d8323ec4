"""What `make scan` and `make replay` share: options, and the scan itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from guard.arguments import count
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
        ".parquet)",
    )
    add("--out", type=Path, help=out)
    rows = f"conversations per part (default: {ROWS_A_PART})"
    add("--rows-a-part", type=count, default=ROWS_A_PART, help=rows)
    add("--force", action="store_true", help="start over, whatever the folder holds")
    runs = "the folder of weights and results (default: %(default)s)"
    add("--runs", type=Path, default=Runs().root, help=runs)


def judge_all(parts: Sequence[ServedPart], folder: PartFolder) -> ScanManifest:
    """Scan; the finished manifest. Raises GuardError as `scan` does, and for rules that were
    trained again meanwhile.
    """
    manifest = folder.manifest
    warn_if_busy("it may take several times as long")
    print(f"loading {manifest.model} with {len(manifest.rules)} rules", flush=True)
    with open_engines(parts) as engine:
        manifest.check_served(engine.rules)
        return scan(engine, folder)
