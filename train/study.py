"""Trains every point of a study: `python -m train.study --rule RULE --data FILE`.

Each point's weights are made as `make train` makes a rule's, from the point's own rows and in its
own folder; aLoRAs of all points are trained together. Knows nothing of test labels or baselines.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from guard.errors import GuardError, exits_cleanly
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from guard.rule import RULES, load_rule
from guard.study import (
    add_recipe_arguments,
    add_study_arguments,
    load_study,
    named_recipes,
    point_runs,
    study_folder,
)
from train.job import Job
from train.run import JobAndRows, claimed_and_trained, outdated_jobs, report_failed, see_one_gpu


def train_study(
    folder: Path, recipes: Sequence[Recipe], *, force: bool = False, rules: Path = RULES
) -> None:
    """Train each point of the study in `folder` by every method of the recipes, where its inputs
    changed. A threshold is balanced, whatever false-positive rate the rule wants: a point has too
    few rows to choose another. A point whose rows are bad leaves the others untouched; a GuardError
    that names what was not trained is raised when the rest is done. A bad recipe is raised at once.
    """
    study = load_study(folder)
    rule = load_rule(study.rule, rules).balanced
    work: list[JobAndRows] = []
    failed: list[str] = []
    for recipe in recipes:
        builder = prompt_builder(recipe)
        for point in study.points:
            if study.is_day_zero(point):
                continue
            jobs: list[Job] = []
            for method in recipe.methods:
                seed = point.seed * METHODS[method].is_seeded
                runs = point_runs(folder, point)
                jobs.append(Job(rule, recipe, method, seed, builder, runs, of_study=True))
            try:
                outdated, without_threshold = outdated_jobs(jobs, force=force)
            except GuardError as error:
                print(f"{point.name} on {recipe.name}: {error}", flush=True)
                failed.append(f"{point.name} on {recipe.name}")
                continue
            work += outdated
            failed += without_threshold
    report_failed([*failed, *claimed_and_trained(work, force=force)])


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.study",
        description="Train every point of a study that `python -m data.study` has written.",
    )
    add_study_arguments(parser)
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="train again what is up to date")
    args = parser.parse_args()
    see_one_gpu(os.environ)
    folder = study_folder(args.runs, args.rule, args.data)
    train_study(folder, named_recipes(args), force=args.force)


if __name__ == "__main__":
    main()
