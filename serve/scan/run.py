"""`python -m serve.scan.run --files logs/*.jsonl`, entry of `make scan`.

Judges stored conversations by trained rules, part by part. What is cut off at any point goes on
with the first part that is not there: no row is lost, and none is written twice.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from guard.arguments import count
from guard.card import load_card
from guard.errors import exits_cleanly
from guard.layout import Runs
from guard.machine.neighbours import warn_if_busy
from guard.method import METHODS
from guard.verdict import Verdict
from serve.engine.mixed import CheckEngine
from serve.engine.score import Check
from serve.scan.judge import judge
from serve.scan.parts import FORMATS, Format, PartFolder, ScanManifest, ScanRow
from serve.scan.sources import HUB, StoredConversation, find_sources, read_source, size_of
from serve.selection import Selection, ServedPart, served_parts, start_engine

RowOrigin = tuple[str, int, str, str]  # source, row, id, rule
ROWS_A_PART = 1024  # what a kill costs at most, and within what conversations are sorted


def manifest_of(
    parts: Sequence[ServedPart], sources: Sequence[str], rows_a_part: int, format_: Format
) -> ScanManifest:
    """What is to be scanned by what. Raises GuardError for weights that cannot be read."""
    rules: dict[str, tuple[str, float]] = {}
    calibrations: dict[str, tuple[float, ...]] = {}
    for part in parts:
        for name, folder in part.folders.items():
            card = load_card(folder)
            rules[name] = (card.weights_sha256, card.threshold)
            calibrations[name] = (card.temperature, card.bias, *card.uncertainty_band)
    states: dict[str, tuple[int, int]] = {}
    for source in sources:
        changed_ns = 0 if source.startswith(HUB) else Path(source).stat().st_mtime_ns
        states[source] = (size_of(source), changed_ns)
    model = ",".join(part.recipe.name for part in parts)
    return ScanManifest(model, states, rules, rows_a_part, format_, calibrations=calibrations)


def scan(engine: CheckEngine, folder: PartFolder) -> ScanManifest:
    """Write every part that is not there; the finished manifest.

    Raises GuardError where a source cannot be read, and what the engine raises.
    """
    manifest = folder.manifest
    counts: dict[str, Counter[str]] = {rule: Counter() for rule in manifest.rules}
    conversations = 0
    with ScanBar(manifest) as progress:
        for number, stored in enumerate(_chunks(manifest)):
            conversations += len(stored)
            if not folder.has(number):
                folder.write(number, _rows(engine, stored, manifest))
            for row in folder.read(number):
                counts[row["rule"]][row["verdict"]] += 1
            progress.done(stored)
    finished = replace(
        manifest,
        is_finished=True,
        conversations=conversations,
        verdicts={rule: dict(count) for rule, count in counts.items()},
    )
    folder.finish(finished)
    return finished


def _chunks(manifest: ScanManifest) -> Iterator[list[StoredConversation]]:
    stored = itertools.chain.from_iterable(read_source(source) for source in manifest.sources)
    while chunk := list(itertools.islice(stored, manifest.rows_a_part)):
        yield chunk


def _rows(
    engine: CheckEngine, stored: Sequence[StoredConversation], manifest: ScanManifest
) -> list[ScanRow]:
    rules = list(manifest.rules)
    readable = [conversation for conversation in stored if not conversation.problem]
    checks = iter(judge(engine, [conversation.messages for conversation in readable], rules))
    rows: list[ScanRow] = []
    for conversation in stored:
        check = None if conversation.problem else next(checks)
        for rule in rules:
            rows.append(_row(conversation, rule, check, manifest.rules[rule][0]))
    return rows


def _row(
    stored: StoredConversation, rule: str, check: Check | None, weights_sha256: str
) -> ScanRow:
    origin = (stored.source, stored.number, stored.id, rule)
    reason = stored.problem
    if check is not None:
        for verdict in check.verdicts:
            if verdict.rule == rule:
                return _judged(origin, verdict, weights_sha256)
        reason = check.refused[rule].why
    return ScanRow(*origin, "unjudged", None, None, None, weights_sha256, reason)


def _judged(origin: RowOrigin, verdict: Verdict, weights_sha256: str) -> ScanRow:
    return ScanRow(
        *origin,
        verdict="violation" if verdict.violates else "allow",
        p_violation=verdict.p_violation,
        threshold=verdict.threshold,
        confident=verdict.confident,
        weights_sha256=weights_sha256,
    )


class ScanBar:
    """A bar over the bytes of the sources, with how many conversations a second are judged."""

    def __init__(self, manifest: ScanManifest) -> None:
        total = sum(size for size, _ in manifest.sources.values())
        self._bar = tqdm(total=total or None, unit="B", unit_scale=True, desc="scan")
        self._conversations = 0
        self._behind = 0  # bytes of the sources that are read
        self._source = ""

    def __enter__(self) -> ScanBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def done(self, stored: Sequence[StoredConversation]) -> None:
        """So many more are judged."""
        self._conversations += len(stored)
        for conversation in stored:
            if conversation.source != self._source:
                self._behind += size_of(self._source) if self._source else 0
                self._source = conversation.source
        self._bar.update(self._behind + stored[-1].read_bytes - self._bar.n)
        self._bar.set_postfix_str(f"{self._conversations:,} conversations")


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
    add("--force", action="store_true", help="begin anew, whatever the folder holds")
    add("--runs", type=Path, default=Runs().root, help="where the weights are")
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    runs = Runs(arguments.runs)
    sources = find_sources(shlex.split(arguments.files))
    parts = served_parts(Selection(arguments.model, arguments.rules, arguments.method, runs=runs))
    manifest = manifest_of(parts, sources, arguments.rows_a_part, arguments.format)
    out = arguments.out or runs.root / "scan"
    if arguments.force and (out / "scan.json").is_file():
        shutil.rmtree(out)
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
    warn_if_busy("a scan may take several times as long")
    print(f"loading {manifest.model} with {len(manifest.rules)} rules", flush=True)
    with start_engine(parts) as engine:
        finished = scan(engine, folder)
    print(summary(finished, out))


if __name__ == "__main__":
    main()
