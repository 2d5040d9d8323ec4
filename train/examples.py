"""Labelled conversations as prompts, checked before anything expensive runs; and openings of them.
Knows nothing of tensors or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from guard.calibration_rows import check_rows
from guard.conversation.example import FEWEST_ROWS, SPLITS, Example, Split, read_examples
from guard.errors import GuardError
from guard.layout import split_files
from guard.prompt.decoder import Prompt, PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.rule import Rule
from train.job import Job

SHOWN_IDS = 5


@dataclass(frozen=True)
class Row:
    """One example as the model sees it; `label` 1 = violates. Rows of a `group` share a context;
    one that `is_generated` is the offline generator's; `is_twin` as of its example.
    """

    id: str
    split: Split
    label: int
    prompt: Prompt
    group: str = ""
    is_generated: bool = False
    is_twin: bool = False

    def verdict_id(self, builder: PromptBuilder) -> int:
        """The token that answers the prompt."""
        if self.label:
            return builder.yes_id
        return builder.no_id


@dataclass(frozen=True)
class Rows:
    """The three splits of one rule."""

    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    test: tuple[Row, ...]

    def own(self) -> Rows:
        return self._chosen(is_generated=False)

    def generated(self) -> Rows:
        return self._chosen(is_generated=True)

    def _chosen(self, *, is_generated: bool) -> Rows:
        chosen: list[tuple[Row, ...]] = []
        for split in (self.train, self.validation, self.test):
            chosen.append(tuple(row for row in split if row.is_generated == is_generated))
        return Rows(*chosen)


def has_of_each_label(rows: Sequence[Row], count: int) -> bool:
    violating = sum(row.label for row in rows)
    return min(violating, len(rows) - violating) >= count


def load(job: Job) -> Rows:
    """Read and check the splits of the job's rule and build their prompts. Raises GuardError,
    naming ids, for a split with fewer than two examples of a class, a foreign or repeated example,
    a prompt that with its verdict token exceeds the context, unless it is a training row of the
    generator, which is left out, or too few validation rows for a rate that the rule states.
    """
    folder, rule, builder = job.data, job.rule, job.builder
    splits: list[tuple[Row, ...]] = []
    for file, split in zip(split_files(folder), SPLITS, strict=True):
        examples = read_examples(file)
        _check_split(examples, file, rule, split)
        rows: list[Row] = []
        for example in examples:
            prompt = builder.build(example.messages, job.rule_text)
            row = Row(example.id, split, example.label, prompt, example.group, example.is_generated)
            rows.append(replace(row, is_twin=example.is_twin))
        splits.append(tuple(rows))
    train, validation, test = splits
    longest = job.recipe.context_tokens - builder.verdict_tokens
    fitting = tuple(r for r in train if not r.is_generated or len(r.prompt.token_ids) <= longest)
    if len(fitting) < len(train) and has_of_each_label(fitting, FEWEST_ROWS):
        count = len(train) - len(fitting)
        print(f"{rule.id}: generated rows of over {longest} tokens left out: {count}", flush=True)
        train = fitting
    _check_rows((*train, *validation, *test), folder, longest)
    check_rows(validation, rule, where=split_files(folder)[1])
    return Rows(train, validation, test)


def _check_split(examples: Sequence[Example], file: Path, rule: Rule, split: Split) -> None:
    remedy = "Run `make data` for this rule again"
    for key, expected in (("rule", rule.id), ("split", split)):
        stated = {row.id: getattr(row, key) for row in examples}
        foreign = [f"{row} ({value})" for row, value in stated.items() if value != expected]
        if foreign:
            problem = f"examples of another {key}"
            raise GuardError(problem, where=file, got=_first_ids(foreign), remedy=remedy)
    classes = Counter(example.label for example in examples)
    if min(classes[0], classes[1]) < FEWEST_ROWS:
        problem = "a split needs at least two examples that violate the rule and two that do not"
        got = f"{classes[1]} and {classes[0]}"
        remedy = "Add examples of that kind, or make the split larger"
        raise GuardError(problem, where=file, got=got, remedy=remedy)


def _check_rows(rows: Sequence[Row], folder: Path, longest: int) -> None:
    counts = Counter(row.id for row in rows)
    repeated = [row_id for row_id, count in counts.items() if count > 1]
    if repeated:
        remedy = "Give every example its own id"
        raise GuardError("duplicate ids", where=folder, got=_first_ids(repeated), remedy=remedy)
    too_long = [row.id for row in rows if len(row.prompt.token_ids) > longest]
    if too_long:
        problem = f"prompts of more than {longest} tokens exceed the context and are never cut"
        remedy = "Shorten or drop these conversations, or use a base with a longer context"
        raise GuardError(problem, where=folder, got=_first_ids(too_long), remedy=remedy)


def _first_ids(ids: Sequence[str]) -> str:
    """The first few of many ids, and how many there are."""
    shown = ", ".join(ids[:SHOWN_IDS])
    if len(ids) > SHOWN_IDS:
        return f"{shown} and {len(ids) - SHOWN_IDS} more"
    return shown


# One in so many rows has its opening as a row; a head reads no words of these (docs/lessons.md).
ADAPTER_EVERY = 6
HEAD_EVERY = 20


def with_openings(job: Job, rows: Rows, every: int) -> Rows:
    """The rows, and the opening of one training row in `every`; generated ones are counted apart.

    An opening is the turns before the first judged one, as a user's message before it is answered.
    Of it an encoder's rule reads all (`guard/prompt/windows.py`), and flags it at random if all its
    rows hold judged turns. So openings are rows as well, and allowed.
    """
    if job.rule.judged == "conversation":
        return rows
    builder = cast(EncoderPromptBuilder, job.builder)
    openings: list[Row] = []
    for row in (*rows.generated().train[::every], *rows.own().train[::every]):
        token_ids = tuple(builder.opening(row.prompt.token_ids, job.reads))
        if token_ids:
            prompt = Prompt(token_ids, invocation_start=len(token_ids))
            openings.append(replace(row, id=f"{row.id}/opening", label=0, prompt=prompt))
    return replace(rows, train=(*rows.train, *openings))
