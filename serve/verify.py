"""Whether the receipts of an audit log hold: `python -m serve.verify`, entry of `make verify`.

It needs no server. The public key verifies signatures; the private one also tells which receipts
are of a conversation, which the versions in the registry may judge again. Exit status: 1 for a
receipt that does not hold or a verdict that is another one now, 2 for what cannot be verified.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from guard.errors import GuardError, exits_cleanly
from guard.files.strict_json import read_json
from guard.layout import Runs
from guard.recipe import load_recipe
from serve.api.observe.receipts import MAKE_KEY, ChainEnd, Receipt, ReceiptKey
from serve.registry.registry import Registry
from serve.registry.rollout import SHOWN_DIGITS, trial_name
from serve.scan.judge import judge
from serve.scan.sources import StoredConversation, find_sources, names_of, read_source
from serve.selection import ServedPart, open_engines

TOLERANCE = 0.01  # of p: another batch, or machine, rounds otherwise
UNSIGNED = "without KEY= the chain alone is verified: no signature was looked at"


class BrokenReceipt(GuardError):
    """A line that is not the one that was written, or not in its place."""


class JudgedLine(NamedTuple):
    """A check's receipt, and where it stands."""

    where: str
    line: dict[str, Any]


@dataclass
class Ledger:
    """What receipts say that are read in their order. With a `key` each must have its signature.
    The checks of the contents that `judged` has, by their hashes, are kept there.
    """

    key: ReceiptKey | None = None
    judged: Mapping[str, list[JudgedLine]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    times: list[str] = field(default_factory=list)  # the first and the last
    verdicts: Counter[str] = field(default_factory=Counter)  # by rule and version
    described: set[str] = field(default_factory=set)
    cut_off: list[str] = field(default_factory=list)
    begins: int = 1  # the number of the first
    end: ChainEnd | None = None
    _doubtful: str = ""  # where the last line that is not whole stands, until the next receipt

    def read(self, path: Path) -> None:
        """Raises BrokenReceipt for the first one, and GuardError for no file."""
        opened = gzip.open if path.suffix == ".gz" else open
        try:
            with opened(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    self.follow(line.removesuffix(b"\n"), f"{path}:{number}")
        except (OSError, EOFError) as error:
            remedy = 'Name the files in their order: AUDIT="audit.jsonl.1 audit.jsonl"'
            raise GuardError(f"cannot be read: {error}", where=path, remedy=remedy) from error

    def follow(self, line: bytes, where: str) -> None:
        """Take one more line. Raises BrokenReceipt."""
        receipt = Receipt.parse(line)
        if receipt is None:
            if _is_json(line):
                raise BrokenReceipt("no receipt: it was added, or its hash taken out", where=where)
            self.cut_off.append(where)
            self._doubtful = where
            return
        if hashlib.sha256(receipt.body).hexdigest() != receipt.hash:
            raise BrokenReceipt("the line was edited", where=where)
        self._check_place(receipt, where)
        if self.key is not None:
            if not receipt.signature:
                raise BrokenReceipt("the line has no signature", where=where)
            if not self.key.has_signed(receipt.hash, receipt.signature):
                raise BrokenReceipt("the signature is not by this key", where=where)
        try:
            self._count(receipt.content, where)
        except (KeyError, TypeError):
            raise BrokenReceipt("not a line that a server writes", where=where) from None
        self.end, self._doubtful = receipt.end, ""

    def _check_place(self, receipt: Receipt, where: str) -> None:
        if self.end is None:
            self.begins = receipt.end.number
            return
        missing = receipt.end.number - self.end.number - 1
        if receipt.content["previous"] == self.end.hash and not missing:
            return
        if self._doubtful:
            problem = "not cut off but edited: the next line follows it"
            raise BrokenReceipt(problem, where=self._doubtful)
        if missing > 0:
            raise BrokenReceipt(f"{missing} lines before it are missing", where=where)
        raise BrokenReceipt("it does not follow the line before it", where=where)

    def _count(self, line: dict[str, Any], where: str) -> None:
        self.kinds[line["kind"]] += 1
        self.times = [min([*self.times, line["time"]]), max([*self.times, line["time"]])]
        if line["kind"] == "version":
            self.described.add(line["version"])
        for rule in line.get("rules", ()):
            name = f"{rule['rule']} {rule['version'][:SHOWN_DIGITS]}"
            if rule["version"] not in self.described:
                name += ", which no line before describes"
            self.verdicts[name] += 1
        if line.get("content") in self.judged:
            self.judged[line["content"]].append(JudgedLine(where, line))

    def summary(self) -> str:
        """The figures for a person."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.kinds.items()))
        lines = [f"{self.kinds.total():,} lines hold: {kinds or 'none'}"]
        lines += [f"{where}: cut off, and no answer was given" for where in self.cut_off]
        if self.begins > 1:
            lines.append(f"begins at number {self.begins}: the lines before it are not here")
        if self.end is not None:
            lines.append(f"from {self.times[0]} to {self.times[1]}")
            lines += [f"{count:,} verdicts of {name}" for name, count in self.verdicts.items()]
            lines.append(f"the last is number {self.end.number}, {self.end.hash}")
        return "\n".join([*lines, "signed by this key" if self.key else UNSIGNED])


def _is_json(line: bytes) -> bool:
    try:
        read_json(line)
    except (ValueError, RecursionError):
        return False
    return True


def stored_by_hash(files: str, key: ReceiptKey | None) -> dict[str, StoredConversation]:
    """The conversations of files, by what a receipt has of them. Raises GuardError without the
    private key, and for a conversation that cannot be read.
    """
    if key is None or key.private is None:
        problem = "only the private key tells whose receipt it is"
        raise GuardError(problem, remedy=f"Name it with KEY=. {MAKE_KEY}")
    stored: dict[str, StoredConversation] = {}
    for source in find_sources(names_of(files)):
        for conversation in read_source(source):
            if conversation.problem:
                where = f"{source}, row {conversation.number}"
                raise GuardError(conversation.problem, where=where, remedy="Leave it out")
            stored.setdefault(key.content_hash(conversation.messages), conversation)
    return stored


def parts_of(rules: Sequence[dict[str, Any]], runs: Runs) -> list[ServedPart]:
    """The versions that judged, as `RULE@VERSION`. Raises GuardError if the registry lacks one."""
    registry = Registry(runs)
    known = {
        version.id: version for rule in registry.rules() for version in registry.versions(rule)
    }
    if missing := {_name(rule) for rule in rules if rule["version"] not in known}:
        problem, remedy = "versions that judged are missing", "Name the server's folder: --runs"
        raise GuardError(
            problem, where=registry.file, got=", ".join(sorted(missing)), remedy=remedy
        )
    folders: defaultdict[tuple[str, str], dict[str, Path]] = defaultdict(dict)
    for rule in rules:
        version = known[rule["version"]]
        folders[version.rule.model, version.rule.method][_name(rule)] = version.folder
    return [ServedPart(load_recipe(of[0]), of[1], named) for of, named in folders.items()]


def _name(rule: Mapping[str, Any]) -> str:
    return trial_name(rule["rule"], rule["version"])


def again(
    judged: Sequence[tuple[StoredConversation, JudgedLine]], runs: Runs
) -> Iterator[tuple[str, bool]]:
    """What each verdict of the receipts is now, a line each, and whether it is the same."""
    judged = [(stored, judgement) for stored, judgement in judged if judgement.line.get("rules")]
    rules = [rule for _, judgement in judged for rule in judgement.line["rules"]]
    if not rules:
        return
    with open_engines(parts_of(rules, runs)) as engine:
        for stored, (where, line) in judged:
            (check,) = judge(engine, [stored.messages], [_name(rule) for rule in line["rules"]])
            now = {verdict.rule: verdict for verdict in check.verdicts}
            for rule in line["rules"]:
                p, word, verdict = rule["p_violation"], rule["verdict"], now.get(_name(rule))
                text = f"{where}: {_name(rule)} {word} {p:.6f}, again "
                if verdict is None:
                    yield f"{text}unjudged", False
                    continue
                is_same = abs(verdict.p_violation - p) <= TOLERANCE and verdict.word == word
                yield f"{text}{verdict.word} {verdict.p_violation:.6f}", is_same


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.verify", description="Verify the receipts of an audit log."
    )
    add = parser.add_argument
    add("--audit", required=True, help="files in their order, separated by blanks; also .gz")
    add("--key", type=Path, help="the public or private key in PEM; without it the chain alone")
    add("--files", help="conversations, as `make scan` reads them: which receipts judged them")
    add("--again", action="store_true", help="judge them again by the versions that judged")
    add("--runs", type=Path, default=Runs().root, help="the folder with the registry")
    arguments = parser.parse_args()
    if arguments.again and not arguments.files:
        parser.error("--again needs the conversations: --files")
    return arguments


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    key = ReceiptKey.read(arguments.key, may_be_public=True) if arguments.key else None
    stored = stored_by_hash(arguments.files, key) if arguments.files else {}
    ledger = Ledger(key, {content: [] for content in stored})
    try:
        for name in names_of(arguments.audit):
            ledger.read(Path(name))
    except BrokenReceipt as error:
        print(ledger.summary())
        print(f"broken: {error}", file=sys.stderr)
        sys.exit(1)
    if not ledger.kinds:
        remedy = "Name the file of `make up AUDIT=`"
        raise GuardError("there is no receipt", where=arguments.audit or "AUDIT=", remedy=remedy)
    print(ledger.summary())
    judged: list[tuple[StoredConversation, JudgedLine]] = []
    for content, conversation in stored.items():
        place = f"{conversation.source}, row {conversation.number}"
        for where, line in ledger.judged[content]:
            request = f"{line['time']}, request {line['request_id']}"
            print(f"{place}: {line['verdict']} by {where}, {request}")
        if not ledger.judged[content]:
            print(f"{place}: no receipt")
        judged += [(conversation, judgement) for judgement in ledger.judged[content]]
    if arguments.again:
        _print_again(judged, Runs(arguments.runs))


def _print_again(judged: Sequence[tuple[StoredConversation, JudgedLine]], runs: Runs) -> None:
    """Ends the process with 1 if a verdict is another one."""
    status = 0
    for line, is_same in again(judged, runs):
        print(line if is_same else f"{line}: differs", flush=True)
        status = status or int(not is_same)
    sys.exit(status)


if __name__ == "__main__":
    main()
