"""What a data source takes and gives.

Knows nothing of any single source: `SOURCES` in `data/sources.py` lists them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data.ingest import Splitting, ingest
from data.rows import SourceRow
from guard.conversation.example import Example
from guard.rule import Rule


class SourceOptions(Protocol):
    """What one source can be asked for besides a rule; no other source reads it."""

    def inputs(self) -> list[Any]:
        """Its part of what the data depend on, as JSON."""


@dataclass(frozen=True)
class DataRequest:
    """The data that a rule is to get.

    `source` is the text that names it, on the command line or in the rule's file, and `options` are
    its own. Only rows of your own are split as `splitting` says. A source may keep files of its own
    in `folder`.
    """

    rule: Rule
    source: str
    options: SourceOptions | None
    seed: int
    splitting: Splitting
    folder: Path


@dataclass(frozen=True)
class SourcedData:
    """The examples in splits, how many rows were dropped as leaks, and manifest fields."""

    examples: list[Example]
    dropped: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def no_files(source: str) -> list[Path]:
    """The files of a source that reads none."""
    return []


def no_arguments(parser: ArgumentParser) -> None:
    """The command line of a source that has no options of its own."""


def whole_name(source: str) -> str:
    """The whole name, as what names your own rows, for a source that holds nothing else."""
    return source


def no_options(rule: Rule, earlier: Mapping[str, Any], arguments: Namespace) -> None:
    """The options of a source that has none."""


@dataclass(frozen=True)
class DataSource:
    """One way for a rule to get its data.

    `shape` is how it is named, for the help and for errors. `files` are those it reads: where one
    changes, the data are built again. What lies elsewhere is read again only by force.

    `arguments` adds its options to the command line; those whose names stand in `flags` are refused
    with a source that has no such flag. `options` makes what `load` needs of the rule, the manifest
    of last time and the parsed command line. What a source that `is_paid` gave stays until it is
    named again. One that `reads_splits` has rows of your own, split as `--splits` says.
    `own_part` is what names your own rows in the name of a source that has others too.
    """

    shape: str
    description: str
    load: Callable[[DataRequest], SourcedData]
    files: Callable[[str], list[Path]]
    arguments: Callable[[ArgumentParser], None] = no_arguments
    options: Callable[[Rule, Mapping[str, Any], Namespace], SourceOptions | None] = no_options
    flags: tuple[str, ...] = ()
    is_paid: bool = False
    reads_splits: bool = False
    own_part: Callable[[str], str] = whole_name


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
