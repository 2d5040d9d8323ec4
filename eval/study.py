"""The report of a study: `python -m eval.study --rule RULE --data FILE`.

Every method and a bag of words of the same rows, on the same test rows -> AUROC with intervals,
paired differences. The methods' logits are those that training kept, from plain PEFT or
transformers; of aLoRAs on cached prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from eval.answers import BAG_OF_WORDS, group_numbers, label_of, on_base
from eval.bag_of_words import fit_bag_of_words
from eval.metrics import Estimate, RankedRows, auroc_difference, auroc_estimate
from eval.report.tables import markdown_table
from eval.trial import TrialRequirements
from guard.conversation.example import Example, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import save_figures
from guard.files.yaml_file import Strict
from guard.layout import fingerprint, read_splits, split_files
from guard.machine.provenance import provenance
from guard.method import METHODS
from guard.recipe import Recipe
from guard.rule import RULES, Rule, load_rule
from guard.study import (
    Study,
    StudyPoint,
    add_recipe_arguments,
    add_study_arguments,
    is_mixed,
    load_study,
    named_recipes,
    point_runs,
    short_name,
    study_folder,
)
from guard.weights.predictions import DAY_ZERO, read_predictions

Logits = dict[tuple[int, str], NDArray[np.float64]]  # by rows and method: [seeds, test rows]


class StudyFigure(Estimate):
    """The AUROC of one method with so many rows, or the difference to that of a method `minus`, on
    the same rows and seeds.
    """

    rows: int
    method: str
    minus: str | None = None

    def __str__(self) -> str:
        """A difference is bold where chance does not explain it."""
        low, high = self.ci95
        if self.minus is None:
            return f"{self.mean:.3f} [{low:.3f}, {high:.3f}]"
        text = f"{self.mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        if low <= 0 <= high:
            return text
        return f"**{text}**"


class StudyReport(Strict):
    """All figures of a study on one model. `tested`: test rows, of which some are `violating`."""

    study: Study
    model: str
    tested: int
    violating: int
    figures: tuple[StudyFigure, ...]
    commit: str
    hardware: str
    versions: dict[str, str]

    @property
    def methods(self) -> list[str]:
        largest = self.study.sizes[-1]
        return [it.method for it in self.figures if it.minus is None and it.rows == largest]

    @property
    def by_place(self) -> dict[tuple[int, str, str | None], StudyFigure]:
        return {(it.rows, it.method, it.minus): it for it in self.figures}

    def as_markdown(self) -> str:
        """Methods, and the differences of every two of them, against numbers of rows."""
        label = "rows, about a fifth of them validation"
        if is_mixed(self.study.data):
            label = f"own {label}, beside generated ones"
        rows = []
        pairs: list[tuple[str, str | None]] = [(method, None) for method in self.methods]
        pairs += [(later, earlier) for earlier, later in itertools.combinations(self.methods, 2)]
        for method, minus in pairs:
            name = label_of(method)
            if minus is not None:
                name += f" minus {label_of(minus)}"
            places = [(size, method, minus) for size in self.study.sizes]
            rows.append([name, *(str(self.by_place.get(place, "-")) for place in places)])
        table = markdown_table([label, *(f"{size:,}" for size in self.study.sizes)], rows)
        bold = "Bold: the interval of the paired difference excludes 0."
        seeds = len(self.study.of_size(self.study.sizes[0]))
        heading = f"{self.study.rule} on {self.model}, {short_name(self.study.data)}. AUROC with "
        heading += f"95 % intervals, bootstrap over rows' groups and {seeds} seeds. "
        heading += f"Test rows: {self.tested:,} ({self.violating:,} violate)."
        return "\n".join([heading, "", table, "", bold])

    def save(self, path: Path) -> None:
        """Write `path`, and the Markdown beside it, each whole or not at all."""
        save_figures(path, json.dumps(self.model_dump(mode="json"), indent=1), self.as_markdown())


def report_study(
    folder: Path, recipes: Sequence[Recipe], rules: Path = RULES, name: str = ""
) -> StudyReport:
    """Measure the study in `folder` and write its report as JSON and Markdown. The files are
    called `name`, or after the recipes. Raises GuardError where something was not trained.
    """
    study = load_study(folder)
    models = [recipe.name for recipe in recipes]
    logits = study_logits(folder, study, recipes, load_rule(study.rule, rules))
    examples = shared_test_rows(folder, study)
    labels = np.array([example.label for example in examples], dtype=np.int64)
    report = StudyReport(
        study=study,
        model=" and ".join(models),
        tested=len(labels),
        violating=int(labels.sum()),
        figures=tuple(_figures(RankedRows(labels, group_numbers(examples)), logits)),
        **provenance(),
    )
    report.save(folder / f"{name or '_'.join(models)}.json")
    return report


def _figures(rows: RankedRows, logits: Logits) -> Iterator[StudyFigure]:
    """By number of rows, every method's AUROC and every two methods' difference."""
    for size in tqdm(dict.fromkeys(size for size, _ in logits), "intervals", leave=False):
        of_size = [method for rows_drawn, method in logits if rows_drawn == size]
        methods = [method for method in of_size if len(logits[size, method])]
        for number, method in enumerate(methods):
            figure = partial(StudyFigure, rows=size, method=method)
            yield figure(**vars(auroc_estimate(rows, logits[size, method])))
            for minus in methods[:number]:
                pair = logits[size, method], logits[size, minus]
                yield figure(minus=minus, **vars(auroc_difference(rows, *pair)))


def study_logits(folder: Path, study: Study, recipes: Sequence[Recipe], rule: Rule) -> Logits:
    """The logits of every size and method of the study in `folder`, bag of words first. With
    several recipes, a method is named with its base. Raises GuardError where a point's weights are
    missing, or were trained on other rows or another base, for another wording, or by other
    settings.
    """
    tests = shared_test_rows(folder, study)
    by_point: dict[tuple[StudyPoint, str], list[float]] = {}
    contenders = [BAG_OF_WORDS]
    trained = [point for point in study.points if not study.is_day_zero(point)]
    for recipe in recipes:
        names = {method: method for method in recipe.methods}
        if len(recipes) > 1:
            names = {method: on_base(recipe.name, method) for method in recipe.methods}
        contenders += names.values()
        revision = recipe.base_revision
        for point in trained:
            runs = point_runs(folder, point)
            data_hash = fingerprint(*split_files(runs.data(rule.id)))
            required = TrialRequirements(runs, recipe, rule.balanced, revision, data_hash, tests)
            for method, name in names.items():
                by_point[point, name] = _kept_logits(required, point, method)
                zero = StudyPoint(rows=0, seed=point.seed)
                if recipe.settings(method).start and study.is_day_zero(zero):
                    split = f"{DAY_ZERO}test"
                    by_point[zero, name] = _kept_logits(required, point, method, split)
    for point in tqdm(trained, desc="bag of words", unit="point", leave=False):
        splits = read_splits(point_runs(folder, point).data(rule.id))
        words = fit_bag_of_words(splits["train"], splits["validation"], rule.balanced)
        by_point[point, BAG_OF_WORDS] = words.logits(tests)
    logits: Logits = {}
    for rows in study.sizes:
        for name in contenders:
            keys = [(point, name) for point in study.of_size(rows)]
            seed_logits = [by_point[key] for key in keys if key in by_point]
            logits[rows, name] = np.array(seed_logits, dtype=np.float64)
    return logits


def shared_test_rows(folder: Path, study: Study) -> list[Example]:
    """The test rows, which are the same at every point. Raises GuardError where they are not."""
    files = [point_runs(folder, point).data(study.rule) / "test.jsonl" for point in study.points]
    if len({fingerprint(file) for file in files if file.is_file()}) > 1:
        remedy = "Run `make curve` again"
        raise GuardError("the points have different test rows", where=folder, remedy=remedy)
    return read_examples(files[0])


def _kept_logits(
    required: TrialRequirements, point: StudyPoint, method: str, split: str = "test"
) -> list[float]:
    seed = point.seed if METHODS[method].is_seeded else 0
    try:
        logits = read_predictions(required.contestant(method, seed).folder, split, "")
    except GuardError as error:
        remedy = "Run the study's command again: it trains what is missing"
        raise GuardError(error.problem, where=error.where, got=error.got, remedy=remedy) from error
    return [logits[row.id] for row in required.examples]


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.study",
        description="AUROC of every method and a bag of words at every point of a study. Writes "
        "MODEL.{json,md} into the study's folder: of several models MODEL_MODEL, of one method "
        "MODEL_METHOD.",
    )
    add_study_arguments(parser)
    add_recipe_arguments(parser)
    args = parser.parse_args()
    folder = study_folder(args.runs, args.rule, args.data)
    recipes = named_recipes(args)
    name = "_".join(recipe.name for recipe in recipes)
    if args.method:
        name += f"_{args.method}"
    print(report_study(folder, recipes, name=name).as_markdown())
    print(f"written: {folder / name}.json and .md")


if __name__ == "__main__":
    main()
