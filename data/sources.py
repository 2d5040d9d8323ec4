"""Where labelled rows may come from: the offline generator, an LLM, files of your own, the hub, or
a few rows of your own beside generated ones.

Knows nothing of what becomes of the rows.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data import mixed
from data.debate import debate
from data.debate.writers import EXAMPLES, FEWEST_EXAMPLES, UNLABELLED, Writers, writers_for
from data.generator.generate import Counts, generate
from data.generator.library import (
    load_corpus,
    load_excerpts,
    phrase_files,
    rules_with_phrases,
)
from data.rows import FILE_READERS, HUB, is_readable, local_files, read_rows
from data.source import DataRequest, DataSource, SourcedData, labelled_rows, no_files
from guard.arguments import multiple
from guard.conversation.example import GENERATOR, Example
from guard.errors import GuardError, did_you_mean
from guard.rule import RULES, Rule, load_rule

LLM = "llm"
FILE = "FILE"
COUNTED_SPLITS = tuple(vars(Counts()))  # an option each


def _counts(rule: Rule, earlier: Mapping[str, Any], args: argparse.Namespace) -> Counts:
    stated = {split: getattr(args, split) for split in COUNTED_SPLITS}
    return Counts(**{split: rows for split, rows in stated.items() if rows is not None})


def _generated(request: DataRequest) -> SourcedData:
    if not isinstance(request.options, Counts):
        raise ValueError(f"data of {GENERATOR} need counts")
    return SourcedData(generated(request.rule, request.options, request.seed))


def generated(rule: Rule, counts: Counts, seed: int) -> list[Example]:
    """The rows of the offline generator."""
    neighbours = [load_rule(path.stem) for path in rules_with_phrases(RULES)]
    return generate(load_corpus(rule, neighbours), counts, seed, load_excerpts(rule))


def _generator_files(source: str) -> list[Path]:
    """The phrases and their rules: every rule's data hold acts of others."""
    return [*phrase_files(), *rules_with_phrases(RULES)]


def _mixed_files(source: str) -> list[Path]:
    return [*_generator_files(source), *mixed.own_files(source)]


def _writers(rule: Rule, earlier: Mapping[str, Any], args: argparse.Namespace) -> Writers:
    return writers_for(rule, earlier, args.examples, args.unlabelled)


def _debated(request: DataRequest) -> SourcedData:
    writers = request.options
    if not isinstance(writers, Writers):
        raise ValueError(f"data of {LLM} need writers")
    examples, statistics = debate.generate(
        request.rule,
        writers.wanted,
        request.seed,
        writers.endpoint,
        writers.seeds,
        request.folder / "answers.jsonl",
        writers.budget_usd,
    )
    notes = {
        "debate": statistics,
        "examples": writers.wanted,
        "unlabelled": writers.unlabelled,
    }
    return SourcedData(examples, notes=notes)


def _add_generator_arguments(parser: argparse.ArgumentParser) -> None:
    for split, count in vars(Counts()).items():
        parser.add_argument(
            f"--{split}",
            type=functools.partial(multiple, of=4, at_least=4),  # pairs, in two strata
            help=f"generated rows (default {count})",
        )


def _add_llm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--examples",
        type=functools.partial(multiple, of=2, at_least=FEWEST_EXAMPLES),
        help=f"for '{LLM}': rows to write (default: as last time, or {EXAMPLES})",
    )
    parser.add_argument(
        "--unlabelled",
        help=f"for '{LLM}': a file as for --data, labels or not; its first {UNLABELLED} rows show "
        "what occurs",
    )


# A source is named by its key, and where the key ends in ":" or "+", by what follows it too. A new
# one is a function in a file of its own and a row here; `labelled_rows` makes one of a function
# that reads rows.
SOURCES: dict[str, DataSource] = {
    GENERATOR: DataSource(
        GENERATOR,
        "the offline generator, from the rule's phrases",
        _generated,
        _generator_files,
        arguments=_add_generator_arguments,
        options=_counts,
        flags=COUNTED_SPLITS,
    ),
    LLM: DataSource(
        LLM,
        "written and debated by the endpoint of the GENERATOR_… variables, within its budget",
        _debated,
        no_files,
        arguments=_add_llm_arguments,
        options=_writers,
        flags=("unlabelled", "examples"),
        is_paid=True,
    ),
    FILE: DataSource(
        FILE,
        f"labelled rows of your own: {', '.join(FILE_READERS)}",
        labelled_rows(read_rows),
        local_files,
        reads_splits=True,
    ),
    mixed.GENERATOR_AND: DataSource(
        f"{mixed.GENERATOR_AND}{FILE}",
        f"a few labelled rows of your own beside generated ones; also {mixed.GENERATOR_AND}{HUB}…",
        mixed.beside(_generated),
        _mixed_files,
        options=_counts,
        flags=COUNTED_SPLITS,
        reads_splits=True,
        own_part=mixed.own_part,
    ),
    HUB: DataSource(
        f"{HUB}ORG/NAME[:CONFIGURATION]",
        "labelled rows of a hub data set, or of a local folder",
        labelled_rows(read_rows),
        local_files,
        reads_splits=True,
    ),
}


def source_named(name: str) -> DataSource:
    """The entry of SOURCES for the text that names a source.

    Raises GuardError naming those there are.
    """
    for key, source in SOURCES.items():
        if name == key or (key.endswith((":", "+")) and name.startswith(key)):
            return source
    if is_readable(name) or Path(name).exists():
        return SOURCES[FILE]
    names = f"Known: {', '.join(source.shape for source in SOURCES.values())}"
    raise GuardError(
        "there is no such data source",
        got=name,
        remedy=f"{did_you_mean(name, SOURCES)} {names}".strip(),
    )
