"""The report of a study: `python -m eval.study.run transfer --rule RULE --data FILE`.

Every method and a bag of words of the same rows, on the same test rows -> AUROC with intervals,
paired differences, a picture. Knows nothing of training.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from eval.ranking import RankedRows, auroc_difference, auroc_estimate
from eval.scored import group_numbers
from eval.study.answers import Logits, shared_test_rows, study_logits
from eval.study.picture import draw_study
from eval.study.report import StudyCell, StudyDifference, StudyReport, study_report_path
from guard.conversation.example import Example
from guard.errors import exits_cleanly
from guard.machine.provenance import provenance
from guard.recipe import Recipe
from guard.rule import RULES, load_rule
from guard.study import (
    Origin,
    Study,
    add_recipe_arguments,
    add_study_arguments,
    load_study,
    named_recipes,
    origin_of,
    study_folder,
)


def report_study(
    folder: Path, recipes: Sequence[Recipe], rules: Path = RULES, name: str = ""
) -> StudyReport:
    """Measure the study in `folder` and write its report as JSON, Markdown and a picture.

    The files are called `name`, or after the recipes.

    Raises GuardError where something was not trained.
    """
    study = load_study(folder)
    rule = load_rule(study.rule, rules)
    models = [recipe.name for recipe in recipes]
    logits = study_logits(folder, study, recipes, rule)
    examples = shared_test_rows(folder, study)
    present = {origin_of(example) for example in examples}
    origins = [origin for origin in get_args(Origin) if origin in present]
    cells: list[StudyCell] = []
    differences: list[StudyDifference] = []
    for origin in tqdm(origins, desc="intervals", unit="origin", leave=False):
        chosen = np.array([origin_of(example) == origin for example in examples])
        rows = _tested([example for example in examples if origin_of(example) == origin])
        cells += _cells(origin, rows, logits, chosen)
        differences += _differences(study, origin, rows, logits, chosen)
    report = StudyReport(
        study=study.model_copy(update={"path": None}),  # a path of this machine
        title=rule.title,
        model=" and ".join(models),
        tested={origin: _count(examples, origin, labels=(0, 1)) for origin in origins},
        violating={origin: _count(examples, origin, labels=(1,)) for origin in origins},
        cells=tuple(cells),
        differences=tuple(differences),
        **provenance(),
    )
    path = study_report_path(folder, name or "_".join(models))
    draw_study(report, path.with_suffix(".png"))
    report.save(path)
    return report


def _tested(examples: Sequence[Example]) -> RankedRows:
    labels = np.array([example.label for example in examples], dtype=np.int64)
    return RankedRows(labels, group_numbers(examples))


def _count(examples: Sequence[Example], origin: Origin, labels: Sequence[int]) -> int:
    return sum(origin_of(row) == origin and row.label in labels for row in examples)


def _cells(
    origin: Origin, rows: RankedRows, logits: Logits, chosen: NDArray[np.bool_]
) -> Iterator[StudyCell]:
    for (size, method), seed_logits in logits.items():
        estimate = auroc_estimate(rows, seed_logits[:, chosen])
        yield StudyCell(
            rows=size,
            origin=origin,
            method=method,
            auroc=estimate.mean,
            ci95=estimate.ci95,
            by_seed=estimate.by_seed,
        )


def _differences(
    study: Study, origin: Origin, rows: RankedRows, logits: Logits, chosen: NDArray[np.bool_]
) -> Iterator[StudyDifference]:
    """The AUROC differences of every two methods, the later one minus the earlier."""
    methods = list(dict.fromkeys(method for _, method in logits))
    for size in study.sizes:
        for earlier, later in itertools.combinations(methods, 2):
            estimate = auroc_difference(
                rows, logits[size, later][:, chosen], logits[size, earlier][:, chosen]
            )
            yield StudyDifference(
                rows=size,
                origin=origin,
                minuend=later,
                subtrahend=earlier,
                difference=estimate.mean,
                ci95=estimate.ci95,
            )


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.study.run",
        description="AUROC of every method and a bag of words at every point of a study. Writes "
        "MODEL.{json,md,png} into the study's folder: of several models MODEL_MODEL, of one method "
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
    report = report_study(folder, recipes, name=name)
    path = study_report_path(folder, name)
    print(report.as_markdown())
    print(f"written: {path}, .md and .png")


if __name__ == "__main__":
    main()
