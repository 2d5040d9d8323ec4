"""What a data source takes and gives.

Knows nothing of any single source: `SOURCES` in `data/build.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.debate.writers import Writers
from data.generator.generate import Counts
from data.ingest import Splitting, ingest
from data.rows import SourceRow
from guard.example import Example
from guard.rule import Rule


@dataclass(frozen=True)
class DataRequest:
    """The data that a rule is to get.

    `source` is the text that names it, on the command line or in the rule's file. What a source has
    no use for it leaves alone: only the generator reads `counts`, only rows of your own are split
    as `splitting` says, and only what an endpoint writes needs `writers`, and keeps its answers in
    `folder`.
    """

    rule: Rule
    source: str
    counts: Counts
    seed: int
    splitting: Splitting
    folder: Path
    writers: Writers | None = None


@dataclass(frozen=True)
class SourcedData:
    """The examples in splits, how many rows were dropped as leaks, and manifest fields."""

    examples: list[Example]
    dropped: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def no_files(source: str) -> list[Path]:
    """The files of a source that reads none."""
    return []


@dataclass(frozen=True)
class DataSource:
    """One way for a rule to get its data.

    `shape` is how it is named, for the help and for errors. `files` are those it reads: where one
    changes, the data are built again. What lies elsewhere is read again only by force.
    """

    shape: str
    description: str
    load: Callable[[DataRequest], SourcedData]
    files: Callable[[str], list[Path]] = no_files


def labelled_rows(
    read: Callable[[str], Iterable[SourceRow]],
) -> Callable[[DataRequest], SourcedData]:
    """A source of labelled rows, from the function that reads them.

    They are checked and assigned to splits.

    `read` takes the text that names the source. Each row has the fields that `data/ingest.py`
    documents.
    """

    def load(request: DataRequest) -> SourcedData:
        rows = read(request.source)
        ingested = ingest(rows, request.source, request.rule, request.seed, request.splitting)
        return SourcedData(ingested.examples, ingested.dropped)

    return load
