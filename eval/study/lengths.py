"""Verdicts on long turns: by length, and by where in it stands what decides. Entry of
`make lengths`.

Test rows are written anew with a long turn (`data/long_turns.py`), half of them violating, and put
to the served weights. A violation that is allowed, and said to be `confident`, is what no rule may
do often. Answers are kept: only what is missing is asked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from data.long_turns import LongTurns, Position
from eval.answers import group_numbers, scored_answers
from eval.report.tables import markdown_table, share_cell
from eval.served import OpenPredictor, Served, open_engine, score_missing
from eval.trial import Trial, answering_recipe, load_trial
from guard.arguments import multiple, whole_numbers
from guard.conversation.example import ROLES, Example, Message
from guard.errors import exits_cleanly
from guard.files.atomic import save_figures
from guard.files.yaml_file import Strict
from guard.home import ROOT
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.recipe import Recipe
from guard.rule import RULES, rule_names
from guard.study import add_recipe_arguments, named_recipes

LENGTHS = (1_000, 4_000, 12_000)  # characters of the long turn
ROWS = 200  # of a cell
CellPosition = Position | Literal["as it is", "in a document", "many turns"]
AS_IT_IS: CellPosition = "as it is"  # the row without a long turn
# What training has no rows of: the deciding turn amid the paragraphs of a license, and among turns
# of other rows.
DOCUMENT: CellPosition = "in a document"
MANY_TURNS: CellPosition = "many turns"

Key = tuple[int, CellPosition]  # a cell's characters and position
Write = Callable[..., Example | None]  # a row anew, of so many `characters`, by a `rng`


class LengthCell(Strict):
    """Verdicts of one method on `n` rows of one length and position, `violating` of which violate.
    `unjudged` were refused, most as they do not fit the context. `missed` are violations that are
    allowed, `missed_confident` those of them that are said to be sure, `flagged` allowed rows that
    are called a violation, and `confident` all verdicts that are.
    """

    rule: str
    method: str
    characters: int
    position: CellPosition
    n: int
    violating: int
    unjudged: int
    missed: int
    missed_confident: int
    flagged: int
    confident: int


class Lengths(Strict):
    """All cells on one base."""

    model: str
    cells: tuple[LengthCell, ...]
    commit: str
    hardware: str
    versions: dict[str, str]

    def as_markdown(self) -> str:
        head = ["characters", "what decides", "method", "n", "violations missed"]
        head += ["missed and confident", "harmless flagged", "confident", "unjudged"]
        together: dict[tuple[str, str, str], Counter[str]] = {}
        for cell in self.cells:
            key = (f"{cell.characters:,}", cell.position, cell.method)
            counts = cell.model_dump(exclude={"rule", "method", "characters", "position"})
            together.setdefault(key, Counter()).update(counts)
        rows: list[list[str]] = []
        for about, it in together.items():
            shares = [
                share_cell(it["missed"], it["violating"]),
                share_cell(it["missed_confident"], it["violating"]),
                share_cell(it["flagged"], it["n"] - it["violating"]),
                share_cell(it["confident"], it["n"]),
            ]
            rows.append([*about, str(it["n"]), *shares, str(it["unjudged"])])
        return markdown_table(head, rows)

    def save(self, path: Path) -> None:
        save_figures(path, json.dumps(self.model_dump(mode="json"), indent=2), self.as_markdown())


def lengths(
    selection: str,
    recipe: Recipe,
    *,
    characters: Sequence[int] = LENGTHS,
    rows: int = ROWS,
    runs: Runs | None = None,
    rules: Path = RULES,
    open_predictor: OpenPredictor = open_engine,
) -> Lengths:
    """The cells of the selected rules and methods. Raises GuardError for what is not trained."""
    served: list[Served] = []
    keys: list[list[Key]] = []
    for name in rule_names(selection, rules):
        trial = load_trial(runs or Runs(), recipe, recipe.base_revision, name, rules=rules)
        written = list(_written(trial, characters, rows))
        keys.append([key for key, _ in written])
        rows_of_trial = trial.of_rows([row for _, row in written], "lengths")
        served.append(Served(rows_of_trial, with_base=False))
    score_missing(served, answering_recipe(recipe), open_predictor)
    cells: list[LengthCell] = []
    for kept, rule_keys in zip(served, keys, strict=True):
        for method in kept.trial.methods:
            cells += _cells(kept, method, rule_keys)
    return Lengths(model=recipe.name, cells=tuple(cells), **provenance())


def _written(trial: Trial, characters: Sequence[int], rows: int) -> Iterator[tuple[Key, Example]]:
    """The rows of each cell, the same ones at every call."""
    chosen: list[Example] = []
    for label in (0, 1):
        candidates = [example for example in trial.examples if example.label == label]
        chosen += random.Random(0).sample(candidates, min(rows // 2, len(candidates)))
    for example in chosen:
        yield (0, AS_IT_IS), example
    writers = _writers(trial)
    for length, position in itertools.product(characters, writers):
        for example in chosen:
            name = f"{example.id}/{length}/{position}"
            row = writers[position](example, characters=length, rng=random.Random(name))
            if row is not None:
                yield (length, position), replace(row, id=name)


def _writers(trial: Trial) -> dict[CellPosition, Write]:
    amid_allowed = LongTurns.amid_allowed(trial.rule, trial.examples)
    writers: dict[CellPosition, Write] = {}
    for position in amid_allowed.positions:
        writers[position] = partial(amid_allowed.written, position=position)
    if not trial.rule.depends_on_context:
        paragraphs = (ROOT / "LICENSE").read_text().split("\n\n")
        document = LongTurns(trial.rule, dict.fromkeys(ROLES, paragraphs))
        writers[DOCUMENT] = partial(document.written, position="middle")
        writers[MANY_TURNS] = partial(_among_turns, trial)
    return writers


def _among_turns(trial: Trial, example: Example, characters: int, rng: random.Random) -> Example:
    """The row among turns of allowed ones, in the middle; last where only the last turn counts."""
    allowed = [row for row in trial.examples if not row.label and row.group != example.group]
    around: list[tuple[Message, ...]] = []
    for row in rng.sample(allowed, len(allowed)):
        if characters <= 0:
            break
        around.append(tuple(message for message in row.messages if message.role != "system"))
        characters -= sum(len(message.content) for message in around[-1])
    cut = len(around)
    if trial.rule.turns != "last":
        cut //= 2
    conversations = (*around[:cut], example.messages, *around[cut:])
    return replace(example, messages=tuple(itertools.chain.from_iterable(conversations)))


def _cells(kept: Served, method: str, keys: Sequence[Key]) -> Iterator[LengthCell]:
    """The cells of one rule's rows, whose `keys` are in the order of its trial's examples."""
    trial = kept.trial
    labels, groups = [example.label for example in trial.examples], group_numbers(trial.examples)
    scored = scored_answers(labels, kept.answers(trial.served(method)), groups)
    indices: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    for (characters, position), chosen in indices.items():
        cell = scored.part(chosen)
        is_missed = cell.is_answered & (cell.labels == 1) & (cell.decisions == 0)
        is_flagged = cell.is_answered & (cell.labels == 0) & (cell.decisions == 1)
        yield LengthCell(
            rule=trial.rule.id,
            method=method,
            characters=characters,
            position=position,
            n=len(chosen),
            violating=int(cell.labels.sum()),
            unjudged=int((~cell.is_answered).sum()),
            missed=int(is_missed.sum()),
            missed_confident=int((is_missed & (cell.confident == 1)).sum()),
            flagged=int(is_flagged.sum()),
            confident=int((cell.confident == 1).sum()),
        )


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.study.lengths",
        description="What is missed of test rows with a long turn, in percent, by its length and "
        "by where in it stands what decides. Writes runs/MODEL/lengths.{json,md}.",
    )
    rule = "a rule's name, several separated by commas, or all"
    parser.add_argument("--rule", required=True, help=rule)
    add_recipe_arguments(parser)
    characters = "lengths (default: %(default)s)"
    parser.add_argument("--characters", type=whole_numbers, default=LENGTHS, help=characters)
    even, rows = partial(multiple, of=2, at_least=2), "rows of a cell (default: %(default)s)"
    parser.add_argument("--rows", type=even, default=ROWS, help=rows)
    args = parser.parse_args()
    for recipe in named_recipes(args):
        measured = lengths(args.rule, recipe, characters=args.characters, rows=args.rows)
        path = Runs().root / recipe.name / "lengths.json"
        measured.save(path)
        print(measured.as_markdown())
        print(f"written: {path}, {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
