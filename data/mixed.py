"""A few rows of your own beside the offline generator's: `DATA=generator+FILE`.

Generated rows teach what a rule is about, your own what your traffic looks like; who trains tells
them apart by their `source` (docs/architecture.md). Knows nothing of how either are made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.ingest import ingest
from data.rows import local_files, read_rows
from data.source import DataRequest, SourcedData
from guard.example import Split

GENERATOR_AND = "generator+"
# Of your own rows without a split: of a few, more are needed for validation than of many.
OWN_SHARES: dict[Split, float] = {"train": 0.6, "validation": 0.2, "test": 0.2}


def own_part(source: str) -> str:
    """What names your own rows in the text that names a source."""
    return source.removeprefix(GENERATOR_AND)


def own_files(source: str) -> list[Path]:
    """The files of this machine that your own rows are read from."""
    return local_files(own_part(source))


def beside(
    generated: Callable[[DataRequest], SourcedData],
) -> Callable[[DataRequest], SourcedData]:
    """The source of what `generated` gives and your own rows, read as any others are."""

    def load(request: DataRequest) -> SourcedData:
        source = own_part(request.source)
        own = ingest(
            read_rows(source), source, request.rule, request.seed, request.splitting, OWN_SHARES
        )
        return SourcedData([*generated(request).examples, *own.examples], own.dropped)

    return load
