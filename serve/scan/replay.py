"""`python -m serve.scan.replay A B --files logs/*.jsonl`, entry of `make replay`.

Judges recorded conversations by two versions of a rule's weights in one engine, each conversation
prefilled once for both, and reports which verdicts flip. It is a scan by two adapters a rule: what
is cut off at any point goes on where it was. Without labels it says what changes, not what is
better. Exit status: 1 if B is worse on labelled rows than chance explains, 2 for what cannot be
replayed (by make: 2 for either).

Its page `replay.html` quotes stored conversations, so it is as confidential as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from guard.arguments import count
from guard.conversation.example import Message
from guard.errors import exits_cleanly
from guard.files.atomic import atomic_write
from guard.method import METHODS
from serve.scan.command import add_scan_options, judge_all
from serve.scan.flips import ReplayTally, Row
from serve.scan.parts import PartFolder, ScanManifest, delete_scan, manifest_of
from serve.scan.sources import StoredConversation, find_sources, names_of, read_source
from serve.scan.versions import RuleVersion, VersionPair, Versions, find_versions, replayed_parts

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


def page(
    title: str, notes: Sequence[str], rules: Sequence[tuple[VersionPair, ReplayTally]], texts: Texts
) -> str:
    """The page of the rules' figures, and of their flips with the `texts` of the conversations."""
    template = Template(
        TEMPLATE.read_text(encoding="utf-8"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    html: str = template.render(title=title, notes=notes, rules=rules, texts=texts)
    return html + "\n"


SHOWN = 50  # flips of a rule that the report lists
REPORT, PAGE = "replay.json", "replay.html"
QUOTES = (
    "This page quotes recorded conversations. Without a label a flip says that A and B disagree, "
    "not which of them is right."
)
CARD_FACTS = ("method", "version", "rule_text", "threshold", "temperature", "bias", "seed")


@dataclass(frozen=True)
class ReplayReport:
    """What was counted of each pair of versions, by rule, and of which traffic."""

    manifest: ScanManifest
    conversations: int
    versions: Versions
    tallies: Mapping[str, ReplayTally]

    def as_json(self) -> str:
        """`replay.json`."""
        rules: dict[str, Any] = {}
        for pair in self.versions.pairs:
            rules[pair.rule] = {
                "a": _facts(pair.a),
                "b": _facts(pair.b),
                "differences": pair.differences,
                "shares_prefill": pair.shares_prefill,
                **self.tallies[pair.rule].facts(),
            }
        facts = {
            "model": self.manifest.model,
            "conversations": self.conversations,
            "sources": {source: size for source, (size, _) in self.manifest.sources.items()},
            "rules_of_a_only": self.versions.only_a,
            "rules_of_b_only": self.versions.only_b,
            "unchanged_rules": self.versions.unchanged,
            "rules": rules,
        }
        return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"

    def as_text(self) -> str:
        """The lines for the terminal: what each version flags, and how many verdicts flip."""
        lines = [f"{self.conversations:,} conversations, {len(self.tallies)} rules, two versions"]
        for pair in self.versions.pairs:
            lines += ["", pair.rule]
            for label, text in self.tallies[pair.rule].as_text().items():
                lines.append(f"  {label:<22}{text}")
            lines += [f"  note: {sentence}" for sentence in pair.differences]
        return "\n".join([*lines, *self._left_out()])

    def as_html(self) -> str:
        """`replay.html`. Raises GuardError where a source has changed or cannot be read any more:
        its texts would be of other rows than the verdicts.
        """
        places: list[tuple[str, int]] = []
        for tally in self.tallies.values():
            places += [(flip.source, flip.row) for flip in tally.largest()]
        texts = excerpts(places)
        for source in {source for source, _ in places}:
            self.manifest.check_source(source)
        rules = [(pair, self.tallies[pair.rule]) for pair in self.versions.pairs]
        title = f"Replay: {self.conversations:,} conversations, A against B"
        return page(title, [QUOTES, *self._left_out()], rules, texts)

    def save(self, folder: Path) -> None:
        """Write `replay.html` and `replay.json`, each whole or not at all. Raises as `as_html`."""
        for name, content in ((PAGE, self.as_html()), (REPORT, self.as_json())):
            with atomic_write(folder / name) as part:
                part.write_text(content, encoding="utf-8")

    def _left_out(self) -> list[str]:
        """The rules that were not replayed, one line per reason."""
        reasons = (
            ("only in A", self.versions.only_a),
            ("only in B", self.versions.only_b),
            ("the same in both", self.versions.unchanged),
        )
        return [f"{reason}: {', '.join(rules)}" for reason, rules in reasons if rules]


def report_replay(folder: PartFolder, versions: Versions, shown: int) -> ReplayReport:
    """Read all parts of a finished replay. Raises GuardError where a part is broken."""
    tallies = {pair.rule: ReplayTally(shown) for pair in versions.pairs}
    labelled = _labelled(folder.manifest.sources)
    conversations = 0
    for rows in _conversations(folder):
        conversations += 1
        for pair in versions.pairs:
            a, b = rows[pair.a.name], rows[pair.b.name]
            stored = labelled.get((a["source"], a["row"]))
            tallies[pair.rule].add(a, b, stored.label_for(pair.rule) if stored else None)
    return ReplayReport(folder.manifest, conversations, versions, tallies)


def _labelled(sources: Iterable[str]) -> dict[Place, StoredConversation]:
    """The conversations with a label, without their text."""
    labelled: dict[Place, StoredConversation] = {}
    for source in sources:
        for stored in read_source(source):
            if stored.label is not None:
                labelled[source, stored.number] = replace(stored, messages=())
    return labelled


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
        "versions), or runs/MODEL for all its rules",
    )
    add("b", type=Path, help="the other version, of the same kind of folder")
    add_scan_options(parser, out="the folder for verdicts and report (default: runs/replay)")
    add("--method", help=f"where A and B are folders of rules: {', '.join(METHODS)}")
    shown = f"flips of a rule that the report lists (default: {SHOWN})"
    add("--shown", type=count, default=SHOWN, help=shown)
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
    versions = find_versions(arguments.a, arguments.b, arguments.method)
    sources = find_sources(names_of(arguments.files))
    parts = replayed_parts(versions)
    manifest = manifest_of(parts, sources, arguments.rows_a_part, "jsonl")
    out = arguments.out or arguments.runs / "replay"
    if arguments.force:
        delete_scan(out)
    folder = PartFolder(out, manifest)
    if folder.finished is None:
        judge_all(parts, folder)
    report = report_replay(folder, versions, arguments.shown)
    report.save(out)
    print(report.as_text())
    print(f"written: {out / REPORT}, {out / PAGE}")
    sys.exit(int(any(tally.is_regression for tally in report.tallies.values())))


if __name__ == "__main__":
    main()
