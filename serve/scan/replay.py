"""`python -m serve.scan.replay A B --files logs/*.jsonl`, entry of `make replay`.

Judges recorded conversations by two versions of a rule's weights in one engine, each conversation
prefilled once for both, and reports which verdicts flip. It is a scan by two adapters: what
is cut off at any point goes on where it was. It says what changes, not what is better.

Its page `replay.html` quotes stored conversations, so it is as confidential as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from guard.conversation.example import Message
from guard.errors import exits_cleanly
from guard.files.atomic import atomic_write
from serve.scan.command import add_scan_options, judge_all
from serve.scan.flips import ReplayTally, Row
from serve.scan.parts import PartFolder, ScanManifest, delete_scan, manifest_of
from serve.scan.sources import find_sources, names_of, read_source
from serve.scan.versions import RuleVersion, VersionPair, find_pair, replayed_part

LAST_TURNS, LAST_CHARACTERS = 4, 600  # what is shown of a conversation, and of each turn
ELLIPSIS = "…"
TEMPLATE = Path(__file__).with_name("replay.html.jinja")

Place = tuple[str, int]  # a conversation's source, and its row there
Texts = Mapping[Place, Sequence[Message]]


def excerpts(places: Iterable[Place]) -> dict[Place, tuple[Message, ...]]:
    """The end of each conversation. Raises GuardError for a source that cannot be read any more."""
    by_source: dict[str, set[int]] = {}
    for source, row in places:
        by_source.setdefault(source, set()).add(row)
    texts: dict[Place, tuple[Message, ...]] = {}
    for source, rows in by_source.items():
        last = max(rows)
        for stored in read_source(source):
            if stored.number in rows:
                texts[source, stored.number] = shortened(stored.messages)
            if stored.number >= last:
                break
    return texts


def shortened(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The last turns of a conversation, and of each its end: there mostly is what is judged."""
    turns: list[Message] = []
    for message in messages[-LAST_TURNS:]:
        content = message.content
        if len(content) > LAST_CHARACTERS:
            content = ELLIPSIS + content[-LAST_CHARACTERS:]
        turns.append(Message(message.role, content))
    return tuple(turns)


def page(title: str, pair: VersionPair, tally: ReplayTally, texts: Texts) -> str:
    """The page of the rule's figures, and of its flips with the `texts` of the conversations."""
    template = Template(
        TEMPLATE.read_text(encoding="utf-8"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    html: str = template.render(title=title, note=QUOTES, pair=pair, tally=tally, texts=texts)
    return html + "\n"


SHOWN = 50  # flips that the report lists
REPORT, PAGE = "replay.json", "replay.html"
QUOTES = (
    "This page quotes recorded conversations. A flip says that A and B disagree, not which of them "
    "is right."
)
CARD_FACTS = ("method", "version", "rule_text", "threshold", "temperature", "bias", "seed")


@dataclass(frozen=True)
class ReplayReport:
    """What was counted of a pair of versions, and of which traffic."""

    manifest: ScanManifest
    conversations: int
    pair: VersionPair
    tally: ReplayTally

    def as_json(self) -> str:
        """`replay.json`."""
        facts = {
            "rule": self.pair.rule,
            "model": self.manifest.model,
            "conversations": self.conversations,
            "sources": {source: size for source, (size, _) in self.manifest.sources.items()},
            "a": _facts(self.pair.a),
            "b": _facts(self.pair.b),
            "differences": self.pair.differences,
            "shares_prefill": self.pair.shares_prefill,
            **self.tally.facts(),
        }
        return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"

    def as_text(self) -> str:
        """The lines for the terminal: what each version flags, and how many verdicts flip."""
        lines = [f"{self.pair.rule}: {self.conversations:,} conversations, two versions"]
        for label, text in self.tally.as_text().items():
            lines.append(f"  {label:<22}{text}")
        return "\n".join([*lines, *(f"  note: {sentence}" for sentence in self.pair.differences)])

    def as_html(self) -> str:
        """`replay.html`. Raises GuardError where a source has changed or cannot be read any more:
        its texts would be of other rows than the verdicts.
        """
        places = [(flip.source, flip.row) for flip in self.tally.largest()]
        texts = excerpts(places)
        for source in {source for source, _ in places}:
            self.manifest.check_source(source)
        title = f"Replay: {self.conversations:,} conversations, A against B"
        return page(title, self.pair, self.tally, texts)

    def save(self, folder: Path) -> None:
        """Write `replay.html` and `replay.json`, each whole or not at all. Raises as `as_html`."""
        for name, content in ((PAGE, self.as_html()), (REPORT, self.as_json())):
            with atomic_write(folder / name) as part:
                part.write_text(content, encoding="utf-8")


def report_replay(folder: PartFolder, pair: VersionPair) -> ReplayReport:
    """Read all parts of a finished replay. Raises GuardError where a part is broken."""
    tally = ReplayTally(SHOWN)
    conversations = 0
    for rows in _conversations(folder):
        conversations += 1
        tally.add(rows[pair.a.name], rows[pair.b.name])
    return ReplayReport(folder.manifest, conversations, pair, tally)


def _conversations(folder: PartFolder) -> Iterator[dict[str, Row]]:
    """The rows of each conversation of a finished replay, by the name of the version.

    Raises GuardError if a part is broken.
    """
    finished = folder.finished
    conversations_left = finished.conversations if finished else 0
    names, rows_a_part = len(folder.manifest.rules), folder.manifest.rows_a_part
    for number in folder.numbers():
        rows = list(folder.read(number))
        conversations = min(rows_a_part, conversations_left)
        folder.check_rows(number, len(rows), conversations)
        conversations_left -= conversations
        for start in range(0, len(rows), names):
            yield {row["rule"]: row for row in rows[start : start + names]}


def _facts(version: RuleVersion) -> dict[str, Any]:
    card = {name: getattr(version.card, name) for name in CARD_FACTS}
    return {"folder": str(version.folder), **card}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.scan.replay",
        description="Which verdicts on recorded conversations flip between two versions of a "
        "rule's weights.",
    )
    add = parser.add_argument
    add(
        "a",
        type=Path,
        help="a folder of weights, runs/MODEL/RULE/METHOD (`make rules` names those of older "
        "versions)",
    )
    add("b", type=Path, help="the other version's folder")
    add_scan_options(parser, out="the folder for verdicts and report (default: runs/replay)")
    arguments = parser.parse_args()
    if Path() in (arguments.a, arguments.b):
        parser.error(
            "name two folders of weights, as in make replay A=runs/registry/versions/3f2a... "
            'B=runs/tiny/RULE/alora FILES="logs/*.jsonl"'
        )
    return arguments


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    pair = find_pair(arguments.a, arguments.b)
    sources = find_sources(names_of(arguments.files))
    parts = [replayed_part(pair)]
    manifest = manifest_of(parts, sources, arguments.rows_a_part)
    out = arguments.out or arguments.runs / "replay"
    if arguments.force:
        delete_scan(out)
    folder = PartFolder(out, manifest)
    if folder.finished is None:
        judge_all(parts, folder)
    report = report_replay(folder, pair)
    report.save(out)
    print(report.as_text())
    print(f"written: {out / REPORT}, {out / PAGE}")


if __name__ == "__main__":
    main()
