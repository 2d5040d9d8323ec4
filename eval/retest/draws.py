"""Two test draws of a rule: the one that it was evaluated on, and an independent second one.

Knows nothing of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from data import manifest
from data.build import build
from data.generator.generate import Counts
from data.splits import near_duplicates
from eval.trial import Trial, load_trial
from guard.conversation.example import GENERATOR, SPLITS, Example, read_examples
from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import Recipe
from guard.rule import load_rule, rule_names

SEED = 1  # seed of the second draw; that of the first is 0


@dataclass(frozen=True)
class TwoDraws:
    """A rule's trial on its own test draw, and one of the same weights on the second draw.

    `dropped`: rows of the second draw that came close to a row of the first.
    """

    first: Trial
    second: Trial
    dropped: int


def all_draws(
    selection: str, recipe: Recipe, data: Path | None, runs: Runs, rules: Path
) -> tuple[list[TwoDraws], tuple[str, ...]]:
    """The draws of the selected rules, and a line for each rule of `all` that is left out.

    Raises GuardError if none remains.
    """
    draws: list[TwoDraws] = []
    left_out: list[str] = []
    for name in tqdm(rule_names(selection, rules), desc="drawing and comparing", unit="rule"):
        try:
            second = data or _drawn(runs, name, rules)
            first = load_trial(runs, recipe, recipe.base_revision, name, rules=rules)
            draws.append(_two_draws(first, second / name))
        except GuardError as error:
            if selection != "all":
                raise
            left_out.append(f"{name}: {error}")
    if not draws:
        raise GuardError(
            "no rule has a second test set",
            got="; ".join(left_out),
            remedy="Run `make data train` for one",
        )
    return draws, tuple(left_out)


def _drawn(runs: Runs, name: str, rules: Path) -> Path:
    """The folder with the rule's second draw.

    Raises GuardError where the first is not the offline generator's.
    """
    first = runs.data(name)
    if not (first / "test.jsonl").is_file():
        raise GuardError("no test.jsonl", where=first, remedy=f"Run `make all RULE={name}`")
    if _source(first) != GENERATOR:
        raise GuardError(
            "the rows are not the offline generator's",
            where=first,
            got=_source(first),
            remedy="Name the folder of another test set of that source: "
            "`python -m eval.retest.run --data FOLDER`",
        )
    folder = Runs(runs.root / "second").data(name)
    counts = Counts(train=4, validation=4)
    build(load_rule(name, rules), GENERATOR, counts, SEED, "keep", folder)
    return folder.parent


def _source(data: Path) -> str:
    """The source of a rule's rows."""
    return str(manifest.load(data).get("source", "unknown"))


def _two_draws(first: Trial, second: Path) -> TwoDraws:
    """Both draws, the second without the rows that come close to a row of the first.

    Raises GuardError where there is no second draw, or nothing is left of it.
    """
    test = second / "test.jsonl"
    remedy = (
        f"Write one, as `python -m data.build --rule {first.rule.id} --seed {SEED} --runs FOLDER` "
        "does, and name FOLDER/data"
    )
    if not test.is_file():
        raise GuardError("no second test set", where=test, remedy=remedy)
    if _source(first.data) != _source(second):
        got = f"{_source(second)}, the first {_source(first.data)}"
        problem = "the second test set has another source"
        raise GuardError(problem, where=test, got=got, remedy=remedy)
    rows = read_examples(test)
    near = _near_rows(_rows_of(first.data), rows)
    examples = tuple(row for index, row in enumerate(rows) if index not in near)
    if not examples:
        problem = "every row of the second test set comes close to a row of the first"
        raise GuardError(problem, where=test, remedy=remedy)
    second_trial = replace(first, examples=examples, folder=first.folder / "retest")
    return TwoDraws(first, second_trial, len(near))


def _rows_of(data: Path) -> list[Example]:
    """Every row of the first draw, renamed to groups that no second draw has."""
    rows: list[Example] = []
    for split in SPLITS:
        rows += read_examples(data / f"{split}.jsonl")
    return [replace(row, group=f"first/{row.group}") for row in rows]


def _near_rows(first: Sequence[Example], second: Sequence[Example]) -> set[int]:
    """The indices of the rows of the second draw that come close to a row of the first."""
    near = set()
    for pair in near_duplicates([*first, *second]):
        if pair.first < len(first) <= pair.second:
            near.add(pair.second - len(first))
    return near
