"""A few rows of your own beside the offline generator's: `DATA=generator+FILE`.

Generated rows teach what a rule is about, your own what your traffic looks like; who trains tells
them apart (`Example.is_generated`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from data.ingest import ingest
from data.rows import local_files, read_rows
from data.source import DataRequest, SourcedData
from data.splits import near_duplicates
from guard.conversation.example import Example, Split
from guard.errors import GuardError

GENERATOR_AND = "generator+"
# The shares of your own rows without a split: few rows need a larger part for a threshold.
OWN_SHARES: dict[Split, float] = {"train": 0.5, "validation": 0.3, "test": 0.2}
NAMED = 5  # rows that an error names


def own_part(source: str) -> str:
    """The part of a source's text that names your own rows."""
    return source.removeprefix(GENERATOR_AND)


def own_files(source: str) -> list[Path]:
    """The files of this machine that your own rows are read from."""
    return local_files(own_part(source))


def refuse_copies(generated: Sequence[Example], own_rows: Sequence[Example], source: str) -> None:
    """Raise GuardError for rows of your own that are generated ones, nearly so, or have the name of
    one, in whatever split and with whatever label.
    """
    names: set[str] = set()
    for example in generated:
        names |= {example.id, example.group}
    copies: list[str] = []
    for example in own_rows:
        if {example.id, example.group} & names:
            copies.append(f"{example.id} (the id or group of a generated row)")
    all_examples = [*generated, *own_rows]
    for pair in near_duplicates(all_examples):
        if pair.first < len(generated) <= pair.second:
            first, second = all_examples[pair.first], all_examples[pair.second]
            copies.append(f"{second.id} (like {first.id}: {pair.similarity:.2f})")
    if copies:
        got = "; ".join(copies[:NAMED])
        if len(copies) > NAMED:
            got += f" and {len(copies) - NAMED} more"
        remedy = "Remove these rows of yours; SPLITS= does not help here"
        problem = "some of your rows are generated ones, or nearly so"
        raise GuardError(problem, where=source, got=got, remedy=remedy)


def beside(
    generated: Callable[[DataRequest], SourcedData],
) -> Callable[[DataRequest], SourcedData]:
    """The source of what `generated` gives and your own rows, read as any others are."""

    def load(request: DataRequest) -> SourcedData:
        source = own_part(request.source)
        ingested = ingest(
            read_rows(source),
            source,
            request.rule,
            request.seed,
            request.splitting,
            OWN_SHARES,
            fewest=1,  # the generated rows are there too
        )
        sourced = generated(request)
        refuse_copies(sourced.examples, ingested.examples, source)
        examples = [*sourced.examples, *ingested.examples]
        return replace(sourced, examples=examples, dropped=ingested.dropped)

    return load
