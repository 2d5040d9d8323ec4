"""Trains every point of a study: `python -m train.study transfer --rule RULE --data FILE`.

Each point's weights are made as `make train` makes a rule's, from the point's own rows and in its
own folder; aLoRAs of all points are trained together. Knows nothing of test labels or baselines.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from guard.errors import GuardError, exits_cleanly
from guard.machine.neighbours import warn_if_busy
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from guard.rule import RULES, Rule, load_rule
from guard.study import (
    StudyPoint,
    add_recipe_arguments,
    add_study_arguments,
    load_study,
    named_recipes,
    point_runs,
    study_folder,
)
from train.job import Job
from train.run import JobAndRows, check, claimed_jobs, outdated_jobs, see_one_gpu, train


def train_study(
    folder: Path, recipes: Sequence[Recipe], *, force: bool = False, rules: Path = RULES
) -> None:
    """Train each point of the study in `folder` by every method of the recipes, where its inputs
    changed. A threshold is balanced, whatever false-positive rate the rule wants: a point has too
    few rows to choose another. A point whose rows are bad leaves the others untouched; a GuardError
    that names what was not trained is raised when the rest is done. A bad recipe is raised at once.
    """
    study = load_study(folder)
    rule = load_rule(study.rule, rules).model_copy(update={"max_fpr": None})
    work_by_base: list[list[JobAndRows]] = []
    failed: list[str] = []
    for recipe in recipes:
        builder = prompt_builder(recipe)
        work: list[JobAndRows] = []
        for point in study.points:
            jobs = _jobs(rule, recipe, builder, point, folder)
            try:
                outdated, without_threshold = outdated_jobs(jobs, force=force)
            except GuardError as error:
                print(f"{point.name} on {recipe.name}: {error}", flush=True)
                failed.append(f"{point.name} on {recipe.name}")
                continue
            work += outdated
            failed += without_threshold
        work_by_base.append(work)
    if any(work_by_base):
        warn_if_busy("training may take several times as long")
    for work in work_by_base:
        check([job for job, _ in work])
    for work in work_by_base:
        claimed, claimed_elsewhere = claimed_jobs(work, force=force)
        failed += claimed_elsewhere
        failed += train(claimed)
    if failed:
        remedy = "The errors are above; everything else is done"
        raise GuardError(f"not trained: {', '.join(failed)}", remedy=remedy)


def _jobs(
    rule: Rule, recipe: Recipe, builder: PromptBuilder, point: StudyPoint, folder: Path
) -> list[Job]:
    jobs: list[Job] = []
    for method in recipe.methods:
        seed = point.seed if METHODS[method].is_seeded else 0
        jobs.append(Job(rule, recipe, method, seed, builder, point_runs(folder, point)))
    return jobs


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
    folder = study_folder(args.runs, args.kind, args.rule, args.data)
    train_study(folder, named_recipes(args), force=args.force)


if __name__ == "__main__":
    main()
