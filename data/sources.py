"""Where labelled rows may come from. Knows nothing of what becomes of the rows."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.debate import debate
from data.debate.paid_endpoint import EXAMPLES, FEWEST_EXAMPLES, Writers, writers_for
from data.generator.generate import Counts, generate
from data.generator.library import load_corpus, load_excerpts, phrase_files, rules_with_phrases
from data.ingest import SourcedData, Splitting, ingest
from data.reviews import AND_REVIEWS, with_reviews
from data.rows import FILE_READERS, SourceRow, is_readable, local_files, read_rows
from data.splits import refuse_copies
from guard.arguments import multiple
from guard.conversation.example import GENERATOR, GENERATOR_AND, Example, Split
from guard.errors import GuardError, did_you_mean
from guard.layout import Runs
from guard.rule import RULES, Rule, load_rule

LLM = "llm"
FILE = "FILE"
# The shares of your own rows beside generated ones: few rows need a larger part for a threshold.
FEW_OWN_SHARES: dict[Split, float] = {"train": 0.5, "validation": 0.3, "test": 0.2}


@dataclass(frozen=True)
class DataRequest:
    """The data that a rule is to get, in `folder`, where a source may keep files of its own.

    `source` is the text that names the source. Only rows of your own are split as `splitting` says.
    """

    rule: Rule
    source: str
    options: Counts | Writers | None
    seed: int
    splitting: Splitting
    folder: Path

    @property
    def reviews(self) -> Path:
        """The file of the rule's reviewed rows."""
        return Runs(self.folder.parent.parent).reviews(self.rule.id)


@dataclass(frozen=True)
class DataSource:
    """One way for a rule to get its data.

    `shape` is how it is named, for the help and for errors. Where one of its `files` changes, the
    data are built again. `flags` are its options of the command line, with argparse's settings;
    `options` makes what `load` needs of the rule, the manifest of last time and the parsed command
    line. What a source that `is_paid` gave stays until it is named again. One that `reads_splits`
    has rows of your own.
    """

    shape: str
    description: str
    load: Callable[[DataRequest], SourcedData]
    files: Callable[[str], list[Path]] = lambda source: []
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Callable[[Rule, Mapping[str, Any], argparse.Namespace], Counts | Writers] | None = None
    is_paid: bool = False
    reads_splits: bool = False


def labelled_rows(
    read: Callable[[str], Iterable[SourceRow]],
) -> Callable[[DataRequest], SourcedData]:
    """The `load` of a source whose rows `read` gives, with the fields of `data/ingest.py`."""

    def load(request: DataRequest) -> SourcedData:
        rows = read(request.source)
        return ingest(rows, request.source, request.rule, request.seed, request.splitting)

    return load


def generated(rule: Rule, counts: Counts, seed: int) -> list[Example]:
    neighbours = [load_rule(path.stem) for path in rules_with_phrases(RULES)]
    return generate(load_corpus(rule, neighbours), counts, seed, load_excerpts(rule))


def _generated(request: DataRequest) -> SourcedData:
    assert isinstance(request.options, Counts)
    return SourcedData(generated(request.rule, request.options, request.seed))


def own_rows(source: str) -> str:
    """The part of a source's text that names your own rows."""
    return source.removesuffix(AND_REVIEWS).removeprefix(GENERATOR_AND)


def _generated_and_own(request: DataRequest) -> SourcedData:
    source, splitting, shares = own_rows(request.source), request.splitting, FEW_OWN_SHARES
    # One row of a label is enough in a split: the generated rows are there too.
    ingested = ingest(
        read_rows(source), source, request.rule, request.seed, splitting, shares, fewest=1
    )
    written = _generated(request).examples
    refuse_copies(written, ingested.examples, source)
    return replace(ingested, examples=[*written, *ingested.examples])


def _generator_files(source: str) -> list[Path]:
    """The phrases and their rules: every rule's data hold acts of others; and rows of your own."""
    return [*phrase_files(), *rules_with_phrases(RULES), *local_files(own_rows(source))]


def _counts(rule: Rule, earlier: Mapping[str, Any], args: argparse.Namespace) -> Counts:
    stated = {split: getattr(args, split) for split in COUNT_FLAGS}
    return Counts(**{split: rows for split, rows in stated.items() if rows is not None})


def _debated(request: DataRequest) -> SourcedData:
    writers = request.options
    assert isinstance(writers, Writers)
    answers = request.folder / "answers.jsonl"
    examples, statistics = debate.generate(request.rule, request.seed, writers, answers)
    notes = {"debate": statistics, "examples": writers.wanted, "unlabelled": writers.unlabelled}
    return SourcedData(examples, notes=notes)


in_pairs = functools.partial(multiple, of=4, at_least=4)  # in two strata
COUNT_FLAGS: dict[str, dict[str, Any]] = {
    split: {"type": in_pairs, "help": f"generated rows (default {rows})"}
    for split, rows in vars(Counts()).items()
}
LLM_FLAGS: dict[str, dict[str, Any]] = {
    "unlabelled": {
        "help": f"for '{LLM}': a file as for --data, labels or not; its first rows show what occurs"
    },
    "examples": {
        "type": functools.partial(multiple, of=2, at_least=FEWEST_EXAMPLES),
        "help": f"for '{LLM}': rows to write (default: as last time, or {EXAMPLES})",
    },
}
# A source is named by its key, and where the key ends in ":" or "+", by what follows it too.
SOURCES: dict[str, DataSource] = {
    GENERATOR: DataSource(
        GENERATOR,
        "the offline generator, from the rule's phrases",
        _generated,
        _generator_files,
        flags=COUNT_FLAGS,
        options=_counts,
    ),
    LLM: DataSource(
        LLM,
        "written and debated by the endpoint of the GENERATOR_… variables, within its budget",
        _debated,
        flags=LLM_FLAGS,
        options=lambda rule, earlier, args: writers_for(
            rule, earlier, args.examples, args.unlabelled
        ),
        is_paid=True,
    ),
    FILE: DataSource(
        FILE,
        f"labelled rows of your own: {', '.join(FILE_READERS)}",
        labelled_rows(read_rows),
        local_files,
        reads_splits=True,
    ),
    GENERATOR_AND: DataSource(
        f"{GENERATOR_AND}{FILE}",
        "a few labelled rows of your own beside generated ones",
        _generated_and_own,
        _generator_files,
        flags=COUNT_FLAGS,
        options=_counts,
        reads_splits=True,
    ),
}


def _with_reviews(source: DataSource) -> DataSource:
    """The source, with reviewed rows beside its own."""

    def load(request: DataRequest) -> SourcedData:
        named = replace(request, source=request.source.removesuffix(AND_REVIEWS))
        return with_reviews(source.load(named), request.reviews, request.rule)

    def files(name: str) -> list[Path]:
        return source.files(name.removesuffix(AND_REVIEWS))

    return replace(source, load=load, files=files)


def source_named(name: str) -> DataSource:
    """The entry of SOURCES for the text that names a source. Raises GuardError for no source."""
    if name.endswith(AND_REVIEWS):
        return _with_reviews(source_named(name.removesuffix(AND_REVIEWS)))
    for key, source in SOURCES.items():
        if name == key or (key.endswith((":", "+")) and name.startswith(key)):
            return source
    if is_readable(name) or Path(name).exists():
        return SOURCES[FILE]
    names = f"Known: {', '.join(source.shape for source in SOURCES.values())}"
    problem = "there is no such data source"
    remedy = f"{did_you_mean(name, SOURCES)} {names}".strip()
    raise GuardError(problem, got=name, remedy=remedy)
