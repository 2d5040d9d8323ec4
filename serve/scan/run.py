"""`python -m serve.scan.run --files logs/*.jsonl`, entry of `make scan`.

Judges stored conversations by trained rules, part by part. What is cut off at any point goes on
with the first missing part: no row is lost, and none is written twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from guard.errors import exits_cleanly
from guard.layout import Runs
from guard.method import METHODS
from serve.scan.command import add_scan_options, judge_all
from serve.scan.parts import PartFolder, ScanManifest, delete_scan, manifest_of
from serve.scan.sources import find_sources, names_of
from serve.selection import Selection, left_out, served_parts


def summary(manifest: ScanManifest, folder: Path) -> str:
    """How many conversations each rule flags, as lines of a table."""
    verdicts = manifest.verdicts or {}
    lines = [f"{manifest.conversations:,} conversations, {len(manifest.rules)} rules"]
    width = max(len(rule) for rule in manifest.rules)
    lines.append(f"{'rule':{width}}  violation      allow   unjudged")
    for rule, counts in verdicts.items():
        numbers = [counts.get(word, 0) for word in ("violation", "allow", "unjudged")]
        lines.append(f"{rule:{width}} " + " ".join(f"{number:10,}" for number in numbers))
    lines.append(f"written: {folder}/part-*.jsonl, scan.json")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.scan.run",
        description="Judge stored conversations by trained rules: a row a conversation and rule.",
    )
    add = parser.add_argument
    add_scan_options(parser, out="the folder for the verdicts (default: runs/scan)")
    add("--model", default="tiny", help="a base of recipes/models, or several (default: tiny)")
    add("--rules", help="comma-separated; default: every trained rule")
    add("--method", help=f"whose weights answer: {', '.join(METHODS)}")
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    runs = Runs(arguments.runs)
    sources = find_sources(names_of(arguments.files))
    selection = Selection(arguments.model, arguments.rules, arguments.method, runs=runs)
    parts = served_parts(selection)
    if line := left_out(selection, parts):
        print(line, flush=True)
    manifest = manifest_of(parts, sources, arguments.rows_a_part)
    out = arguments.out or runs.root / "scan"
    if arguments.force:
        delete_scan(out)
    folder = PartFolder(out, manifest)
    finished = folder.finished
    if finished is None:
        finished = judge_all(parts, folder)
    else:
        print("nothing changed")
    print(summary(finished, out))


if __name__ == "__main__":
    main()
