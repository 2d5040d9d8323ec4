"""`python -m serve.scan.run --files logs/*.jsonl`, entry of `make scan`.

Judges stored conversations by trained rules, part by part. What is cut off at any point goes on
with the first part that is not there: no row is lost, and none is written twice.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from guard.arguments import count
from guard.card import load_card
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.machine.neighbours import warn_if_busy
from guard.method import METHODS
from serve.scan.parts import (
    FORMATS,
    Format,
    PartFolder,
    ScanManifest,
    calibration_of,
    delete_scan,
    weights_of,
)
from serve.scan.scan import scan
from serve.scan.sources import find_sources, names_of, state_of
from serve.selection import Selection, ServedPart, served_parts, start_engine

ROWS_A_PART = 1024  # what a kill costs at most, and within what conversations are sorted


def manifest_of(
    parts: Sequence[ServedPart], sources: Sequence[str], rows_a_part: int, format_: Format
) -> ScanManifest:
    """What is to be scanned by what.

    Raises GuardError for weights that cannot be read, or a data set that is not there.
    """
    rules: dict[str, tuple[str, float]] = {}
    calibrations: dict[str, tuple[float, ...]] = {}
    reads: dict[str, str] = {}
    for part in parts:
        for name, folder in part.folders.items():
            card = load_card(folder)
            rules[name], calibrations[name] = weights_of(card), calibration_of(card)
            reads[name] = card.reads
    states = {source: state_of(source) for source in sources}
    model = ",".join(part.recipe.name for part in parts)
    return ScanManifest(
        model, states, rules, rows_a_part, format_, calibrations=calibrations, reads=reads
    )


def summary(manifest: ScanManifest, folder: Path) -> str:
    """How many conversations each rule flags, as lines of a table."""
    verdicts = manifest.verdicts or {}
    lines = [f"{manifest.conversations:,} conversations, {len(manifest.rules)} rules"]
    width = max(len(rule) for rule in manifest.rules)
    lines.append(f"{'rule':{width}}  violation      allow   unjudged")
    for rule, counts in verdicts.items():
        numbers = [counts.get(word, 0) for word in ("violation", "allow", "unjudged")]
        lines.append(f"{rule:{width}} " + " ".join(f"{number:10,}" for number in numbers))
    lines.append(f"written: {folder}/part-*.{manifest.format}, scan.json")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.scan.run",
        description="Judge stored conversations by trained rules: a row a conversation and rule.",
    )
    add = parser.add_argument
    add(
        "--files",
        required=True,
        help="files, folders and patterns separated by blanks (.jsonl, .jsonl.gz, .ndjson, "
        ".parquet), or hub:ORG/NAME",
    )
    add("--out", type=Path, help="the folder for the verdicts (default: runs/scan)")
    add("--model", default="tiny", help="a base of recipes/models, or several (default: tiny)")
    add("--rules", help="comma-separated; default: every trained rule")
    add("--method", help=f"whose weights answer: {', '.join(METHODS)}")
    add("--format", choices=FORMATS, default="jsonl", help="of the parts (default: jsonl)")
    rows = f"conversations of a part (default: {ROWS_A_PART})"
    add("--rows-a-part", type=count, default=ROWS_A_PART, help=rows)
    add("--cluster", action="store_true", help="by actors of Ray Data, on RAY_ADDRESS or here")
    add("--actors", type=count, help="engines of a --cluster (default: 1)")
    add("--force", action="store_true", help="begin anew, whatever the folder holds")
    add("--runs", type=Path, default=Runs().root, help="where the weights are")
    arguments = parser.parse_args()
    if arguments.actors and not arguments.cluster:
        parser.error("--actors (ACTORS=) is of a --cluster (CLUSTER=1)")
    return arguments


def judge_all(
    parts: Sequence[ServedPart], folder: PartFolder, actors: int | None = None
) -> ScanManifest:
    """Scan in this process, or by so many actors of a cluster; the finished manifest.

    Raises GuardError as they do, and for rules that were trained again meanwhile.
    """
    manifest = folder.manifest
    warn_if_busy("it may take several times as long")
    if actors is not None:
        from serve.scan.cluster import scan_on_cluster  # which imports Ray

        print(f"{actors} actors load {manifest.model} with {len(manifest.rules)} rules", flush=True)
        return scan_on_cluster(partial(start_engine, parts), folder, actors)
    print(f"loading {manifest.model} with {len(manifest.rules)} rules", flush=True)
    with start_engine(parts) as engine:
        manifest.check_served(engine.rules)
        return scan(engine, folder)


def check_ray() -> None:
    """Raise GuardError if Ray is not installed; imports nothing of it."""
    if importlib.util.find_spec("ray") is None:
        remedy = "`make scan CLUSTER=1` installs it; or scan without CLUSTER=1"
        raise GuardError("Ray is not installed", got="--cluster", remedy=remedy)


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    actors: int | None = None
    if arguments.cluster:
        check_ray()
        actors = arguments.actors or 1
    runs = Runs(arguments.runs)
    sources = find_sources(names_of(arguments.files))
    parts = served_parts(Selection(arguments.model, arguments.rules, arguments.method, runs=runs))
    manifest = manifest_of(parts, sources, arguments.rows_a_part, arguments.format)
    out = arguments.out or runs.root / "scan"
    if arguments.force:
        delete_scan(out)
    folder = PartFolder(out, manifest)
    stored = folder.finished
    if stored is not None:
        finished = replace(
            manifest,
            is_finished=True,
            conversations=stored["conversations"],
            verdicts=stored["verdicts"],
        )
        print(f"nothing changed\n{summary(finished, out)}")
        return
    finished = judge_all(parts, folder, actors)
    print(summary(finished, out))


if __name__ == "__main__":
    main()
