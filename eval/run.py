"""Evaluate rules on one base, or on several side by side: a stage for each base, one bag of words
for all of them -> one report. Entry of `make eval`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from eval.bag_of_words import fit_bag_of_words
from eval.evaluation import Evaluation, load_evaluation
from eval.judge.judges import Judge, judge_from, judge_on
from eval.report.report import Report, side_by_side, write_report
from eval.served import OpenPredictor, open_engine
from eval.stage import BagAnswers, Stage
from eval.trial import Trial
from guard.arguments import whole_numbers
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, read_splits
from guard.recipe import Recipe
from guard.rule import RULES
from guard.study import add_recipe_arguments, named_recipes


def run(
    selection: str,
    recipes: Sequence[Recipe],
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    seeds: Sequence[int] | None = None,
    force: bool = False,
    judge: Judge | None = None,
    open_predictor: OpenPredictor = open_engine,
) -> Report:
    """Evaluate the selected rules on every base where their inputs changed, and write the report of
    those that are evaluated on all of them.

    Without a `judge` the base itself judges, zero-shot; if it is an encoder, nobody judges. Raises
    GuardError for bad inputs before an engine starts. If `all` rules are selected, those with bad
    inputs are left out, and the report says why, as long as one remains on every base.
    """
    runs = runs or Runs()
    stages = [Stage(runs, recipe, judge_on(recipe, judge), rules, selection) for recipe in recipes]
    for stage in stages:
        stage.select(seeds, force=force)
    bags = _bags_of_words(stages)
    if force:
        for stage in stages:
            stage.forget()
    errors: list[GuardError] = []
    for stage in stages:
        try:
            stage.evaluate_outdated(bags, force, open_predictor)
        except GuardError as error:  # the other bases' evaluations are kept all the same
            errors.append(error)
    if errors:
        raise errors[0]
    joint, incomplete = _joint(stages)
    left_out: list[str] = []
    for stage in stages:
        left_out += stage.left_out
        for trial in stage.trials:
            left_out += trial.left_out
    report = Report(joint, (*dict.fromkeys(left_out), *incomplete))
    write_report(report, runs.report)
    return report


def _bags_of_words(stages: Sequence[Stage]) -> dict[str, BagAnswers]:
    """The baseline's answers by rule, the same on every base; what cannot be fitted is left out."""
    trials: dict[str, Trial] = {}
    for stage in stages:
        trials |= {trial.rule.id: trial for trial in stage.outdated}
    bags: dict[str, BagAnswers] = {}
    for name, trial in tqdm(trials.items(), "bag of words", unit="rule", disable=not trials):
        splits, rule = read_splits(trial.data), trial.rule
        try:
            fitted = fit_bag_of_words(splits["train"], splits["validation"], rule)
        except GuardError as error:
            for stage in stages:
                stage.leave_out(name, error)
            continue
        bags[name] = (fitted.variant, fitted.answers(trial.examples))
    return bags


def _joint(stages: Sequence[Stage]) -> tuple[tuple[Evaluation, ...], list[str]]:
    """The rules that are evaluated on all bases, each as one evaluation, sorted by name; and a line
    for each of the others that says why it is left out. Raises GuardError where no rule is left, or
    one cannot be put side by side.
    """
    by_rule: dict[str, list[Evaluation]] = {}
    for stage in stages:
        for trial in stage.trials:
            by_rule.setdefault(trial.rule.id, []).append(load_evaluation(trial.folder))
    joint: list[Evaluation] = []
    incomplete: list[str] = []
    for rule, evaluations in sorted(by_rule.items()):
        if len(evaluations) == len(stages):
            joint.append(side_by_side(evaluations))
        else:
            on = ", ".join(evaluation.model for evaluation in evaluations)
            incomplete.append(f"{rule}: evaluated on {on} alone")
    if not joint:
        models = ", ".join(stage.recipe.name for stage in stages)
        problem = f"no rule is evaluated on all of {models}"
        remedy = f"Run `make train eval MODEL=…` of one rule for each of {models}"
        raise GuardError(problem, got="; ".join(incomplete), remedy=remedy)
    return tuple(joint), incomplete


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description="Quality table: LLM judge, bag of words and the recipe's methods on the same "
        "test examples. Writes runs/report.{json,md}.",
        epilog="The judge is an OpenAI-compatible endpoint if JUDGE_BASE_URL and JUDGE_MODEL are "
        "set (guard/endpoint.py has all variables), otherwise the base model, zero-shot.",
    )
    rule = "a rule's name, several separated by commas, or all"
    parser.add_argument("--rule", required=True, help=rule)
    add_recipe_arguments(parser)
    seeds = "for example 0,1,2 (default: every seed that all methods were trained with)"
    parser.add_argument("--seeds", type=whole_numbers, help=seeds)
    force = "ask the engine again even where nothing changed; answers of a paid judge are kept"
    parser.add_argument("--force", action="store_true", help=force)
    arguments = parser.parse_args()
    report = run(
        arguments.rule,
        named_recipes(arguments),
        seeds=arguments.seeds,
        force=arguments.force,
        judge=judge_from(os.environ),
    )
    print(report.as_markdown())
    written = [Runs().report.with_suffix(suffix) for suffix in (".json", ".md")]
    print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
