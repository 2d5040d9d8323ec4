"""`python -m serve.replay.run A B --files logs/*.jsonl`, entry of `make replay`.

Judges recorded conversations by two versions of a rule's weights in one engine, each conversation
prefilled once for both, and reports which verdicts flip. It is a scan by two adapters a rule: what
is cut off at any point goes on where it was. There are no labels, so it says what changes, not what
is better: `make compare` does. Exit status: 2 for what cannot be replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from guard.arguments import count
from guard.errors import exits_cleanly
from guard.method import METHODS
from serve.replay.excerpts import excerpts
from serve.replay.page import PAGE, save_page
from serve.replay.plot import draw_replay
from serve.replay.report import REPORT, ReplayReport
from serve.replay.summary import ReplayTally, Row
from serve.replay.versions import Versions, find_versions, replayed_parts
from serve.scan.manifest import manifest_of
from serve.scan.options import add_scan_options, check_actors, cluster_actors
from serve.scan.parts import PartFolder, delete_scan
from serve.scan.runner import judge_all
from serve.scan.sources import find_sources, names_of

SHOWN = 50  # conversations that a list of the report holds


def report_replay(folder: PartFolder, versions: Versions, shown: int) -> ReplayReport:
    """Read all parts of a finished replay; write `replay.json` and `replay.html` beside them.

    Raises GuardError where a source cannot be read any more or has changed, or a part is broken.
    """
    tallies = {pair.rule: ReplayTally(pair.rule, shown) for pair in versions.pairs}
    conversations = 0
    for rows in _conversations(folder):
        conversations += 1
        for pair in versions.pairs:
            tallies[pair.rule].add(rows[pair.a.name], rows[pair.b.name])
    replays = tuple(tally.result() for tally in tallies.values())
    manifest = folder.manifest
    sizes = {source: size for source, (size, _) in manifest.sources.items()}
    report = ReplayReport(manifest.model, conversations, sizes, versions, replays)
    pictures: dict[str, bytes] = {}
    for pair in versions.pairs:
        probabilities = tallies[pair.rule].probabilities
        if len(probabilities.a):
            thresholds = (pair.a.card.threshold, pair.b.card.threshold)
            pictures[pair.rule] = draw_replay(probabilities, thresholds, pair.rule)
    flipped = [(flip.source, flip.row) for replay in replays for flip in replay.flipped]
    texts = excerpts(flipped)
    for source in {source for source, _ in flipped}:
        manifest.check_source(source)  # else the texts are of other rows than the verdicts
    save_page(folder.folder, report, pictures, texts)
    report.save(folder.folder)
    return report


def _conversations(folder: PartFolder) -> Iterator[dict[str, Row]]:
    """The rows of each conversation of a finished replay, by the name of the version.

    Raises GuardError if a part is broken.
    """
    finished = folder.finished
    conversations_left: int = finished["conversations"] if finished else 0
    names, rows_a_part = len(folder.manifest.rules), folder.manifest.rows_a_part
    for number in folder.numbers():
        rows = list(folder.read(number))
        conversations = min(rows_a_part, conversations_left)
        folder.check_rows(number, len(rows), conversations)
        conversations_left -= conversations
        yield from _by_version(rows, names)


def _by_version(rows: Iterable[Row], names: int) -> Iterator[dict[str, Row]]:
    version_rows: dict[str, Row] = {}
    for row in rows:
        version_rows[row["rule"]] = row
        if len(version_rows) == names:
            yield version_rows
            version_rows = {}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.replay.run",
        description="Which verdicts on recorded conversations flip between two versions of a "
        "rule's weights.",
    )
    add = parser.add_argument
    add(
        "a",
        type=Path,
        help="a folder of weights, runs/MODEL/RULE/METHOD (what training replaced is "
        "RULE/before/METHOD), or runs/MODEL for all its rules",
    )
    add("b", type=Path, help="the other version, of the same kind of folder")
    add_scan_options(parser, out="the folder for verdicts and report (default: runs/replay)")
    add("--method", help=f"where A and B are folders of rules: {', '.join(METHODS)}")
    shown = f"conversations that a list of the report holds (default: {SHOWN})"
    add("--shown", type=count, default=SHOWN, help=shown)
    arguments = parser.parse_args()
    if Path() in (arguments.a, arguments.b):
        parser.error(
            "name two folders of weights, as in make replay A=runs/tiny/RULE/before/alora "
            'B=runs/tiny/RULE/alora FILES="logs/*.jsonl"'
        )
    check_actors(parser, arguments)
    return arguments


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    actors = cluster_actors(arguments)
    versions = find_versions(arguments.a, arguments.b, arguments.method)
    sources = find_sources(names_of(arguments.files))
    parts = replayed_parts(versions)
    manifest = manifest_of(parts, sources, arguments.rows_a_part, "jsonl")
    out = arguments.out or arguments.runs / "replay"
    if arguments.force:
        delete_scan(out)
    folder = PartFolder(out, manifest)
    if folder.finished is None:
        judge_all(parts, folder, actors)
    report = report_replay(folder, versions, arguments.shown)
    print(report.as_text())
    print(f"written: {out / REPORT}, {out / PAGE}")


if __name__ == "__main__":
    main()
