"""A scan in this process: every missing part is judged and written; then all are counted.

Knows nothing of command lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from serve.scan.judge import ScanEngine
from serve.scan.manifest import ScanManifest
from serve.scan.parts import PartFolder
from serve.scan.reading import StoredPart, read_parts
from serve.scan.rows import part_rows

VerdictCounts = Mapping[tuple[str, str], int]  # rows by rule and verdict


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
    """The number of a part's rows by rule and verdict."""
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
        """Add the counts of one more part."""
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
