"""A scan by an actor around an engine without a model, as a process of its own. Tests only.

`python -m tests.serve.scan.words_scan FILE RULES OUT`: RULES holds a folder of weights a rule.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from guard.recipe import load_recipe
from serve.scan.parts import PartFolder, manifest_of
from serve.selection import ServedPart
from tests.serve.cluster.words_engine import SLOWLY, VIOLATES, WordsEngine

ROWS_A_PART = 2


def write_words(path: Path, rows: int) -> Path:
    """Conversations whose every part takes the engine a moment; every third violates all rules."""
    lines = ""
    for number in range(rows):
        word = VIOLATES if number % 3 == 0 else "agrees"
        row: dict[str, Any] = {"messages": [{"role": "user", "content": f"{SLOWLY} {word}"}]}
        lines += json.dumps({"id": f"c{number}"} | (row if number != 5 else {})) + "\n"
    path.write_text(lines)
    return path


def words_folder(file: Path, folders: Mapping[str, Path], out: Path) -> PartFolder:
    """Where such a scan goes. Raises GuardError as `PartFolder`."""
    parts = [ServedPart(load_recipe("tiny"), "alora", folders)]
    return PartFolder(out, manifest_of(parts, [str(file)], ROWS_A_PART, "jsonl"))


def noting_engine(folders: Mapping[str, Path], file: Path) -> WordsEngine:
    """An engine that writes down how long the threads of its process spin."""
    file.write_text(os.environ.get("GOMP_SPINCOUNT", "as long as they like"))
    return WordsEngine(folders)


def main() -> None:
    """Scan; what was killed goes on."""
    from serve.scan.cluster import scan_on_cluster  # Ray, which quick tests do not have

    file, rules, out = (Path(argument) for argument in sys.argv[1:])
    folders = {folder.name: folder for folder in sorted(rules.iterdir())}
    start = partial(noting_engine, folders, out.absolute().parent / "spin_count")
    scan_on_cluster(start, words_folder(file, folders, out), actors=1)


if __name__ == "__main__":
    main()
