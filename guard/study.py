"""A study: a rule trained on more and more rows and tested on the same rows, to compare them.
Each of its points is a folder laid out as `runs/` is.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from guard.arguments import comma_separated
from guard.conversation.example import GENERATOR_AND
from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.strict_json import load_json
from guard.files.yaml_file import Strict, validate
from guard.layout import Runs, fingerprint
from guard.recipe import Recipe, load_recipe

STUDY = "study.json"


class StudyPoint(Strict):
    """The rows that one training draws, validation included; `seed` is of draw and training."""

    rows: int
    seed: int

    @property
    def name(self) -> str:
        return f"rows-{self.rows}-seed-{self.seed}"


class Study(Strict):
    """What is compared. `data` names the source of the rows."""

    rule: str
    data: str
    points: tuple[StudyPoint, ...]

    @property
    def sizes(self) -> list[int]:
        return sorted({point.rows for point in self.points})

    def of_size(self, rows: int) -> list[StudyPoint]:
        return [point for point in self.points if point.rows == rows]

    def is_day_zero(self, point: StudyPoint) -> bool:
        """Whether nothing is trained at this point: there the base's reader answers."""
        return point.rows == 0 and not is_mixed(self.data)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / STUDY) as part:
            part.write_text(json.dumps(self.model_dump(), indent=1) + "\n", encoding="utf-8")


def is_mixed(data: str) -> bool:
    """Whether generated rows stand beside those that a point draws."""
    return data.startswith(GENERATOR_AND)


def short_name(data: str) -> str:
    return GENERATOR_AND * is_mixed(data) + Path(data.removeprefix(GENERATOR_AND)).name


def study_folder(root: Path, rule: str, data: str) -> Path:
    """Files of one name have folders of their own: in none a study takes the place of another."""
    path = Path(data.removeprefix(GENERATOR_AND)).resolve()
    return root / "curve" / f"{rule}-{short_name(data)}-{fingerprint(str(path))[:6]}"


def load_study(folder: Path) -> Study:
    path = folder / STUDY
    remedy = "Run `make curve`, which writes it first"
    if not path.is_file():
        raise GuardError("no such study", where=path, remedy=remedy)
    return validate(load_json(path, remedy=remedy), Study, where=path)


def point_runs(folder: Path, point: StudyPoint) -> Runs:
    return Runs(folder / point.name, f"{point.rows:,} rows")


def add_recipe_arguments(parser: ArgumentParser) -> None:
    model = "a recipe in recipes/models (default: tiny), or several separated by commas"
    parser.add_argument("--model", default="tiny", help=model)
    parser.add_argument("--method", help="a method that the recipes list (default: all of them)")


def named_recipes(arguments: Namespace) -> list[Recipe]:
    recipes = [load_recipe(name) for name in comma_separated(arguments.model, "model")]
    if arguments.method:
        return [recipe.only(arguments.method) for recipe in recipes]
    return recipes


def add_study_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--rule", required=True, help="a rule's name")
    data = f"labelled rows as for make data; {GENERATOR_AND}FILE: beside generated ones"
    parser.add_argument("--data", required=True, metavar="FILE", help=data)
    parser.add_argument("--runs", type=Path, default=Runs().root, help="output (default runs/)")
