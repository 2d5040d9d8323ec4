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
from serve.scan.parts import PartFolder, ScanManifest
from serve.scan.sources import StoredConversation, read_source

VerdictCounts = Counter[tuple[str, str]]  # rows by rule and verdict


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
    before = 0
    for number in itertools.count():
        chunk = list(itertools.islice(stored, manifest.rows_a_part))
        if not chunk:
            return
        conversations = tuple(conversation for conversation, _ in chunk)
        read_bytes = chunk[-1][1]
        yield StoredPart(number, conversations, read_bytes - before)
        before = read_bytes


def _stored_conversations(manifest: ScanManifest) -> Iterator[tuple[StoredConversation, int]]:
    """Each conversation, and how many bytes of all sources are read by then."""
    finished_bytes = 0
    for source, (size, _) in manifest.sources.items():
        for conversation in read_source(source):
            yield conversation, finished_bytes + conversation.read_bytes
        manifest.check_source(source)
        finished_bytes += size


def scan(engine: ScanEngine, folder: PartFolder) -> ScanManifest:
    """Write every missing part; the finished manifest.

    Raises GuardError where a source cannot be read or has changed, a part that exists is broken, or
    the engine answers no longer.
    """
    manifest = folder.manifest
    counts: VerdictCounts = Counter()
    size = sum(size for size, _ in manifest.sources.values())
    with tqdm(total=size or None, unit="B", unit_scale=True, desc="scan") as bar:
        for part in read_parts(manifest):
            if folder.has(part.number):
                kept = count_verdicts(folder.read(part.number))
                folder.check_rows(part.number, kept.total(), len(part.conversations))
                counts.update(kept)
            else:
                rows = part_rows(engine, part.conversations, manifest)
                folder.write(part.number, rows)
                counts.update(count_verdicts(vars(row) for row in rows))
            bar.update(part.read_bytes)
    return finish(folder, counts)


def count_verdicts(rows: Iterable[Mapping[str, Any]]) -> VerdictCounts:
    return Counter((row["rule"], row["verdict"]) for row in rows)


def finish(folder: PartFolder, counts: VerdictCounts) -> ScanManifest:
    """Record that all parts of a scan exist; the finished manifest."""
    manifest = folder.manifest
    verdicts: dict[str, dict[str, int]] = {rule: {} for rule in manifest.rules}
    for (rule, verdict), count in counts.items():
        verdicts[rule][verdict] = count
    conversations = counts.total() // len(manifest.rules)
    finished = replace(manifest, is_finished=True, conversations=conversations, verdicts=verdicts)
    folder.finish(finished)
    return finished
