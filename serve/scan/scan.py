"""A scan in this process: every missing part is judged and written; then all are counted.

Knows nothing of command lines.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from serve.scan.judge import ScanEngine, part_rows
from serve.scan.manifest import ScanManifest
from serve.scan.parts import PartFolder
from serve.scan.sources import StoredConversation, read_source, size_of

VerdictCounts = Mapping[tuple[str, str], int]  # rows by rule and verdict


@dataclass(frozen=True)
class StoredPart:
    """A part's conversations; `read_bytes` of the sources were read for it."""

    number: int
    conversations: tuple[StoredConversation, ...]
    read_bytes: int


def read_parts(manifest: ScanManifest) -> Iterator[StoredPart]:
    """All parts, from 0; a part may begin in one source and end in another.

    Raises GuardError where a source cannot be read, or has changed by the time it is read.
    """
    stored = _stored_conversations(manifest)
    position = _BytePosition()
    for number in itertools.count():
        chunk = tuple(itertools.islice(stored, manifest.rows_a_part))
        if not chunk:
            return
        yield StoredPart(number, chunk, position.advance(chunk))


def _stored_conversations(manifest: ScanManifest) -> Iterator[StoredConversation]:
    for source in manifest.sources:
        yield from read_source(source)
        manifest.check_source(source)


class _BytePosition:
    """The number of bytes that were read of all sources."""

    def __init__(self) -> None:
        self._read_bytes = 0
        self._finished_bytes = 0  # of the sources that are read to their end
        self._source = ""

    def advance(self, chunk: tuple[StoredConversation, ...]) -> int:
        """The bytes that were read for these conversations."""
        before = self._read_bytes
        for conversation in chunk:
            if conversation.source != self._source:
                self._finished_bytes += size_of(self._source) if self._source else 0
                self._source = conversation.source
        self._read_bytes = self._finished_bytes + chunk[-1].read_bytes
        return self._read_bytes - before


def scan(engine: ScanEngine, folder: PartFolder) -> ScanManifest:
    """Write every missing part; the finished manifest.

    Raises GuardError where a source cannot be read or has changed, a part that exists is broken, or
    the engine answers no longer.
    """
    manifest = folder.manifest
    tally = ScanTally(manifest)
    with ScanBar(manifest) as progress:
        for part in read_parts(manifest):
            if folder.has(part.number):
                tally.add(kept_verdicts(folder, part))
            else:
                rows = part_rows(engine, part.conversations, manifest)
                folder.write(part.number, rows)
                tally.add(count_verdicts(vars(row) for row in rows))
            progress.add(len(part.conversations), part.read_bytes)
    finished = tally.finished()
    folder.finish(finished)
    return finished


def count_verdicts(rows: Iterable[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["rule"], row["verdict"]) for row in rows)


def kept_verdicts(folder: PartFolder, part: StoredPart) -> Counter[tuple[str, str]]:
    """`count_verdicts` of a part that exists. Raises GuardError if it is broken."""
    counts = count_verdicts(folder.read(part.number))
    folder.check_rows(part.number, counts.total(), len(part.conversations))
    return counts


class ScanTally:
    """How many rows of each verdict a scan has, part by part."""

    def __init__(self, manifest: ScanManifest) -> None:
        self._manifest = manifest
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, counts: VerdictCounts) -> None:
        self._counts.update(counts)

    def finished(self) -> ScanManifest:
        """The manifest of a scan that has all its parts."""
        rows = sum(self._counts.values())
        verdicts: dict[str, dict[str, int]] = {rule: {} for rule in self._manifest.rules}
        for (rule, verdict), count in self._counts.items():
            verdicts[rule][verdict] = count
        return replace(
            self._manifest,
            is_finished=True,
            conversations=rows // len(self._manifest.rules),
            verdicts=verdicts,
        )


class ScanBar:
    """A progress bar over the bytes of the sources, with the number of judged conversations."""

    def __init__(self, manifest: ScanManifest) -> None:
        total = sum(size for size, _ in manifest.sources.values())
        self._bar = tqdm(total=total or None, unit="B", unit_scale=True, desc="scan")
        self._conversations = 0

    def __enter__(self) -> ScanBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, conversations: int, read_bytes: int) -> None:
        """Advance the bar by judged conversations and the bytes that were read for them."""
        self._conversations += conversations
        self._bar.set_postfix_str(f"{self._conversations:,} conversations", refresh=False)
        self._bar.update(read_bytes)
