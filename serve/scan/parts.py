"""What a scan is of, and its folder of verdicts: parts that are whole or not there.

A manifest says of which sources and rules the folder is, and what else its verdicts depend on; no
other scan goes on in it. Parts that exist are not computed again. Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.weights.card import Card, load_card
from serve.engine.codes import Code
from serve.scan.sources import state_of
from serve.selection import ServedPart

OUTCOMES = ("is_finished", "conversations", "verdicts")  # what a manifest says once it is finished


@dataclass(frozen=True)
class ScanManifest:
    """What was scanned: sources with their `state_of`, rules with their versions, and what else
    their verdicts depend on.

    `engines`: of each base, what decides what fits and in which dtype it is computed. The order of
    the sources is the parts'. `is_finished` once all parts exist, with the number of rows of each
    verdict.
    """

    model: str
    sources: Mapping[str, tuple[int, int]]
    rules: Mapping[str, str]
    rows_a_part: int
    is_finished: bool = False
    conversations: int = 0
    verdicts: Mapping[str, Mapping[str, int]] | None = None
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check_served(self, cards: Mapping[str, Card]) -> None:
        """Raise GuardError if an engine with these cards, by rule, answers by other versions: its
        verdicts would stand under the names of these.
        """
        changed = [rule for rule, version in self.rules.items() if cards[rule].version != version]
        if changed:
            problem, got = "trained again since the scan began", ", ".join(changed)
            remedy = "Wait for the training to end, and begin anew with FORCE=1 or OUT="
            raise GuardError(problem, got=got, remedy=remedy)

    def check_source(self, source: str) -> None:
        """Raise GuardError if a source is not as it was when the scan began: parts would have rows
        of one content and rows of another.
        """
        problem = "it has changed since the scan began"
        try:
            if state_of(source) == self.sources[source]:
                return
        except OSError as error:
            problem = f"it cannot be read any more: {error.strerror}"
        remedy = "Name a copy that nobody writes to, or begin anew with FORCE=1"
        raise GuardError(problem, where=source, remedy=remedy)

    @property
    def inputs(self) -> dict[str, Any]:
        facts = asdict(self)
        for outcome in OUTCOMES:
            del facts[outcome]
        return dict(json.loads(json.dumps(facts)))


def manifest_of(
    parts: Sequence[ServedPart], sources: Sequence[str], rows_a_part: int
) -> ScanManifest:
    """The manifest of a scan of these sources by these parts.

    Raises GuardError for weights that cannot be read.
    """
    rules: dict[str, str] = {}
    engines: dict[str, dict[str, Any]] = {}
    for part in parts:
        recipe = part.recipe
        engines[recipe.name] = {
            "context_tokens": recipe.engine.get("max_model_len", recipe.context_tokens),
            "window_tokens": recipe.window_tokens,
            "dtype": recipe.serving_dtype,
        }
        for name, folder in part.folders.items():
            rules[name] = load_card(folder).version
    return ScanManifest(
        model=",".join(engines),
        sources={source: state_of(source) for source in sources},
        rules=rules,
        rows_a_part=rows_a_part,
        engines=engines,
    )


MANIFEST = "scan.json"
UNFINISHED = ".unfinished"
# The names of what a scan writes, a replay's report among it.
OWN_FILES = (
    *("part-*.jsonl", f"*{UNFINISHED}"),
    *(MANIFEST, "replay.json", "replay.html"),
    *(f"{MANIFEST}.*.part", "replay.json.*.part", "replay.html.*.part"),  # of `atomic_write`
)


@dataclass(frozen=True)
class ScanRow:
    """What a rule says of a conversation; `code` and `reason` are why it is `unjudged`, else empty.

    Where it has no verdict, `p_violation`, `threshold` and `confident` are None.
    """

    source: str
    row: int
    id: str
    rule: str
    verdict: Literal["allow", "violation", "unjudged"]
    p_violation: float | None
    threshold: float | None
    confident: bool | None
    version: str
    code: Code | Literal[""] = ""
    reason: str = ""


def delete_scan(folder: Path) -> None:
    """Delete the scan that a folder holds, if it holds one, its manifest last: if this is killed,
    what is left is still a scan. Raises GuardError for a folder with other files than a scan's.
    """
    if not (folder / MANIFEST).is_file():
        return
    paths = sorted(folder.iterdir())
    foreign = [path.name for path in paths if not _is_own(path)]
    if foreign:
        problem, got = "the folder has more than a scan in it", ", ".join(foreign[:5])
        remedy = "Move that elsewhere, or name another folder with OUT="
        raise GuardError(problem, where=folder, got=got, remedy=remedy)
    for path in sorted(paths, key=lambda path: path.name == MANIFEST):
        path.unlink()


def _is_own(path: Path) -> bool:
    return path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in OWN_FILES)


class PartFolder:
    """The parts of one scan. Raises GuardError if the folder holds something else, or is none."""

    def __init__(self, folder: Path, manifest: ScanManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._refuse_others()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder cannot be created: {error.strerror}"
            raise GuardError(problem, where=folder, remedy="Name another one with OUT=") from error
        if self._stored() is None:
            self._write(manifest)

    @property
    def finished(self) -> ScanManifest | None:
        """The finished manifest, if the scan is complete, and no part of it was deleted since."""
        stored = self._stored()
        if stored is None or not stored["is_finished"]:
            return None
        parts = math.ceil(stored["conversations"] / self.manifest.rows_a_part)
        if self.numbers() != list(range(parts)):
            return None
        return replace(self.manifest, **{name: stored[name] for name in OUTCOMES})

    def has(self, number: int) -> bool:
        return self._part(number).is_file()

    def write(self, number: int, rows: Sequence[ScanRow]) -> None:
        """Write a part, whole or not at all, also if the machine stops at any moment.

        Until it is whole its name is of this process alone: one that was given up, and is not dead
        yet, may be writing the same part.
        """
        unfinished = self.folder / f"{socket.gethostname()}-{os.getpid()}{UNFINISHED}"
        lines = [json.dumps(vars(row), ensure_ascii=False) + "\n" for row in rows]
        unfinished.write_text("".join(lines), encoding="utf-8")
        _to_disk(unfinished)
        unfinished.replace(self._part(number))
        with contextlib.suppress(OSError):  # of file systems that have no such thing for folders
            _to_disk(self.folder)

    def numbers(self) -> list[int]:
        paths = self.folder.glob("part-*.jsonl")
        return sorted(int(path.stem.removeprefix("part-")) for path in paths)

    def read(self, number: int) -> Iterator[dict[str, Any]]:
        """The rows of a part that exists. Raises GuardError for a part that is broken."""
        path = self._part(number)
        try:
            rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        except (OSError, ValueError) as error:
            raise _broken(path, " ".join(str(error).split())) from error
        yield from rows

    def check_rows(self, number: int, rows: int, conversations: int) -> None:
        """Raise GuardError unless a part of so many conversations has `rows` rows."""
        expected = conversations * len(self.manifest.rules)
        if rows != expected:
            raise _broken(self._part(number), f"it has {rows:,} rows, and not {expected:,}")

    def finish(self, manifest: ScanManifest) -> None:
        """Record that all parts exist, and delete what ended processes left unfinished."""
        for path in self.folder.glob(f"*{UNFINISHED}"):
            if _is_abandoned(path):
                path.unlink(missing_ok=True)
        self._write(manifest)

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.jsonl"

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        if not path.is_file():
            return None
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            remedy = "Name another folder with OUT=, or begin anew with FORCE=1"
            raise GuardError(f"the file is broken: {error}", where=path, remedy=remedy) from error

    def _write(self, manifest: ScanManifest) -> None:
        with atomic_write(self.folder / MANIFEST) as part:
            part.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
            _to_disk(part)

    def _refuse_others(self) -> None:
        stored = self._stored()
        if stored is None:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                remedy = "Name another folder with OUT="
                raise GuardError("the folder holds no scan", where=self.folder, remedy=remedy)
            return
        inputs = self.manifest.inputs
        changed = [key for key, value in inputs.items() if stored.get(key) != value]
        if not changed and list(stored["sources"]) != list(inputs["sources"]):
            changed = ["the order of sources"]  # parts are numbered through them
        if changed:
            problem, got = "the folder holds a scan of something else", ", ".join(changed)
            remedy = "Name another folder with OUT=, or begin anew with FORCE=1"
            raise GuardError(problem, where=self.folder, got=f"changed: {got}", remedy=remedy)


def _to_disk(path: Path) -> None:
    """Return once a file, or the names in a folder, would outlive a crash of the machine.

    A file that was only just renamed may otherwise be empty after it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_abandoned(unfinished: Path) -> bool:
    """Whether nobody goes on writing it, as far as that is known: of no other machine's."""
    host, _, pid = unfinished.name.removesuffix(UNFINISHED).rpartition("-")
    if host != socket.gethostname():
        return False
    return pid == str(os.getpid()) or not Path("/proc", pid).exists()


def _broken(part: Path, problem: str) -> GuardError:
    remedy = "Delete it and run the command again, which judges that part again"
    return GuardError(f"the part is broken: {problem}", where=part, remedy=remedy)
