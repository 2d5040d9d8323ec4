"""Stored conversations in parts of equal length, in the order of the sources.

Knows nothing of verdicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from serve.scan.manifest import ScanManifest
from serve.scan.sources import StoredConversation, read_source, size_of


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
