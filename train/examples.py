"""Labelled conversations as prompts, checked before anything expensive runs. Knows nothing of tensors or models."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.example import SPLITS, Split, read_examples
from guard.layout import split_files
from guard.prompt import Prompt, PromptBuilder
from guard.recipe import Recipe
from guard.rule import Rule


@dataclass(frozen=True)
class Row:
    """One example as the model sees it; `label` 1 = violates."""

    id: str
    split: Split
    label: int
    prompt: Prompt


@dataclass(frozen=True)
class Rows:
    """The three splits of one rule."""

    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    test: tuple[Row, ...]


def load(folder: Path, rule: Rule, recipe: Recipe, builder: PromptBuilder) -> Rows:
    """Read and check the splits of `rule` in `folder` and build their prompts as the recipe has them.

    Raises GuardError, naming ids, for a split with fewer than two examples of a class, a foreign or repeated example, or a prompt that
    does not fit the context together with its verdict token.
    """
    train, validation, test = (
        _split(file, split, rule, recipe, builder)
        for file, split in zip(split_files(folder), SPLITS, strict=True)
    )
    rows = (*train, *validation, *test)
    repeated = [row_id for row_id, count in Counter(row.id for row in rows).items() if count > 1]
    if repeated:
        raise GuardError(
            "ids stand more than once",
            where=folder,
            got=_some(repeated),
            remedy="Give every example its own id",
        )
    too_long = [row.id for row in rows if len(row.prompt.token_ids) + 1 > recipe.context_tokens]
    if too_long:
        raise GuardError(
            f"prompts do not fit the context of {recipe.context_tokens} tokens and are never cut",
            where=folder,
            got=_some(too_long),
            remedy="Shorten or drop these conversations, or use a base with a longer context",
        )
    return Rows(train, validation, test)


def _split(
    file: Path, split: Split, rule: Rule, recipe: Recipe, builder: PromptBuilder
) -> tuple[Row, ...]:
    examples = read_examples(file)
    for problem, found in (
        (
            "examples of another rule",
            [f"{example.id} ({example.rule})" for example in examples if example.rule != rule.id],
        ),
        (
            "examples of another split",
            [f"{example.id} ({example.split})" for example in examples if example.split != split],
        ),
    ):
        if found:
            raise GuardError(
                problem, where=file, got=_some(found), remedy="Run `make data` for this rule again"
            )
    classes = Counter(example.label for example in examples)
    if min(classes[0], classes[1]) < 2:
        raise GuardError(
            "a split needs at least two examples that violate the rule and two that do not",
            where=file,
            got=f"{classes[1]} and {classes[0]}",
            remedy="Add examples of that kind, or make the split larger",
        )
    text = rule.text(recipe.rule_turn)
    return tuple(
        Row(example.id, split, example.label, builder.build(example.messages, text))
        for example in examples
    )


def _some(ids: list[str]) -> str:
    """The first few of many ids, and how many there are."""
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
