"""The report of a study: `python -m eval.study.run transfer --rule RULE --data FILE`.

Every method and a bag of words of the same rows, on the same test rows -> AUROC with intervals,
paired differences. The methods' logits are those that training kept, from plain PEFT or
transformers; of aLoRAs on cached prefixes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from eval.answers import BAG_OF_WORDS, group_numbers, on_base
from eval.bag_of_words import fit_bag_of_words
from eval.metrics import RankedRows, auroc_difference, auroc_estimate
from eval.study.report import StudyFigure, StudyReport
from eval.trial import TrialRequirements
from guard.conversation.example import Example, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.home import ROOT
from guard.layout import (
    Runs,
    fingerprint,
    is_current,
    mark_current,
    not_current,
    read_splits,
    split_files,
)
from guard.machine.provenance import provenance
from guard.method import METHODS
from guard.recipe import Recipe
from guard.rule import RULES, Rule, load_rule
from guard.study import (
    ORIGIN,
    Origin,
    Study,
    StudyPoint,
    add_recipe_arguments,
    add_study_arguments,
    load_study,
    named_recipes,
    point_runs,
    study_folder,
)
from guard.weights.predictions import read_predictions, write_predictions

# What the baseline's kept answers depend on besides the rows.
BASELINE_CODE = (
    ROOT / "eval/bag_of_words.py",
    ROOT / "eval/metrics.py",
    ROOT / "guard/calibration_rows.py",
    ROOT / "guard/conversation/example.py",
    ROOT / "guard/prompt/text.py",
    ROOT / "guard/rule.py",
)

Logits = dict[tuple[int, str], NDArray[np.float64]]  # by rows and method: [seeds, test rows]


def report_study(
    folder: Path, recipes: Sequence[Recipe], rules: Path = RULES, name: str = ""
) -> StudyReport:
    """Measure the study in `folder` and write its report as JSON and Markdown. The files are
    called `name`, or after the recipes. Raises GuardError where something was not trained.
    """
    study = load_study(folder)
    rule = load_rule(study.rule, rules)
    models = [recipe.name for recipe in recipes]
    logits = study_logits(folder, study, recipes, rule)
    examples = shared_test_rows(folder, study)
    figures: list[StudyFigure] = []
    tested: dict[Origin, int] = {}
    violating: dict[Origin, int] = {}
    for origin in get_args(Origin):
        chosen = np.array([example.meta[ORIGIN] == origin for example in examples])
        if not chosen.any():
            continue
        rows_of_origin = [example for example in examples if example.meta[ORIGIN] == origin]
        labels = np.array([example.label for example in rows_of_origin], dtype=np.int64)
        rows = RankedRows(labels, group_numbers(rows_of_origin))
        tested[origin], violating[origin] = len(labels), int(labels.sum())
        of_origin = {key: of_seeds[:, chosen] for key, of_seeds in logits.items()}
        figures += _figures(origin, rows, of_origin)
    report = StudyReport(
        study=study,
        model=" and ".join(models),
        tested=tested,
        violating=violating,
        figures=tuple(figures),
        **provenance(),
    )
    report.save(folder / f"{name or '_'.join(models)}.json")
    return report


def _figures(origin: Origin, rows: RankedRows, logits: Logits) -> Iterator[StudyFigure]:
    """By number of rows, every method's AUROC and every two methods' difference."""
    for size in tqdm(dict.fromkeys(size for size, _ in logits), "intervals", leave=False):
        methods = [method for rows_drawn, method in logits if rows_drawn == size]
        for number, method in enumerate(methods):
            figure = partial(StudyFigure, rows=size, origin=origin, method=method)
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
    balanced = rule.model_copy(update={"max_fpr": None})  # as the weights are trained
    by_point: dict[tuple[StudyPoint, str], list[float]] = {}
    contenders = [BAG_OF_WORDS]
    for recipe in recipes:
        names = {method: method for method in recipe.methods}
        if len(recipes) > 1:
            names = {method: on_base(recipe.name, method) for method in recipe.methods}
        contenders += names.values()
        revision = recipe.base_revision
        for point in study.points:
            runs = point_runs(folder, point)
            data_hash = fingerprint(*split_files(runs.data(rule.id)))
            required = TrialRequirements(runs, recipe, balanced, revision, data_hash, tests)
            for method, name in names.items():
                by_point[point, name] = _kept_logits(required, point, method)
    for point in tqdm(study.points, desc="bag of words", unit="point", leave=False):
        by_point[point, BAG_OF_WORDS] = _bag_logits(point_runs(folder, point), rule, tests)
    logits: Logits = {}
    for rows in study.sizes:
        for name in contenders:
            seed_logits = [by_point[point, name] for point in study.of_size(rows)]
            logits[rows, name] = np.array(seed_logits, dtype=np.float64)
    return logits


def shared_test_rows(folder: Path, study: Study) -> list[Example]:
    """The test rows, which are the same at every point. Raises GuardError where they are not."""
    files = [point_runs(folder, point).data(study.rule) / "test.jsonl" for point in study.points]
    if len({fingerprint(file) for file in files if file.is_file()}) > 1:
        remedy = f"Run `make {study.kind}` again"
        raise GuardError("the points have different test rows", where=folder, remedy=remedy)
    return read_examples(files[0])


def _kept_logits(required: TrialRequirements, point: StudyPoint, method: str) -> list[float]:
    seed = point.seed if METHODS[method].is_seeded else 0
    try:
        weights = required.contestant(method, seed)
    except GuardError as error:
        remedy = "Run the study's command again: it trains what is missing"
        raise GuardError(error.problem, where=error.where, got=error.got, remedy=remedy) from error
    return [weights.reference_logits[row.id] for row in required.examples]


def _bag_logits(runs: Runs, rule: Rule, tests: Sequence[Example]) -> list[float]:
    """The baseline's logits, fitted on the point's own rows and kept beside its data."""
    data = runs.data(rule.id)
    folder = runs.root / BAG_OF_WORDS / rule.id
    inputs = fingerprint(*split_files(data), rule.reads, *BASELINE_CODE)
    if not is_current(folder, inputs):
        splits = read_splits(data)
        fitted = fit_bag_of_words(splits["train"], splits["validation"], rule.reads)
        logits = zip(tests, fitted.logits(tests), strict=True)
        folder.mkdir(parents=True, exist_ok=True)
        not_current(folder)
        write_predictions(folder, [(row.id, "test", logit) for row, logit in logits])
        mark_current(folder, inputs)
    predictions = read_predictions(folder, "test", f"Delete {folder}")
    return [predictions[row.id] for row in tests]


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.study.run",
        description="AUROC of every method and a bag of words at every point of a study. Writes "
        "MODEL.{json,md} into the study's folder: of several models MODEL_MODEL, of one method "
        "MODEL_METHOD.",
    )
    add_study_arguments(parser)
    add_recipe_arguments(parser)
    args = parser.parse_args()
    folder = study_folder(args.runs, args.kind, args.rule, args.data)
    recipes = named_recipes(args)
    name = "_".join(recipe.name for recipe in recipes)
    if args.method:
        name += f"_{args.method}"
    print(report_study(folder, recipes, name=name).as_markdown())
    print(f"written: {folder / name}.json and .md")


if __name__ == "__main__":
    main()
