"""Evaluate rules on one base: trials, a bag of words, the stage, one report. Entry of `make eval`.

`make curve` puts several bases side by side.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from eval.bag_of_words import fit_bag_of_words
from eval.evaluation import load_evaluation
from eval.judge.judges import Judge, judge_from, judge_on
from eval.report.report import Report, write_report
from eval.served import OpenPredictor, open_engine
from eval.stage import BagAnswers, Stage
from guard.arguments import whole_numbers
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, read_splits
from guard.recipe import Recipe
from guard.rule import RULES
from guard.study import add_recipe_arguments, named_recipes


def run(
    selection: str,
    recipe: Recipe,
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    seeds: Sequence[int] | None = None,
    force: bool = False,
    judge: Judge | None = None,
    open_predictor: OpenPredictor = open_engine,
) -> Report:
    """Evaluate the selected rules where their inputs changed, and write the report.

    Without a `judge` the base itself judges, zero-shot; if it is an encoder, nobody judges. Raises
    GuardError for bad inputs before an engine starts. If `all` rules are selected, those with bad
    inputs are left out, and the report says why, as long as one remains.
    """
    runs = runs or Runs()
    stage = Stage(runs, recipe, judge_on(recipe, judge), rules, selection)
    stage.select(seeds, force=force)
    bags = _bags_of_words(stage)
    if force:
        stage.forget()
    stage.evaluate_outdated(bags, force, open_predictor)
    left_out = list(stage.left_out)
    for trial in stage.trials:
        left_out += trial.left_out
    trials = sorted(stage.trials, key=lambda trial: trial.rule.id)
    report = Report(tuple(load_evaluation(trial.folder) for trial in trials), tuple(left_out))
    write_report(report, runs.report)
    return report


def _bags_of_words(stage: Stage) -> dict[str, BagAnswers]:
    """The baseline's answers by rule; what cannot be fitted is left out."""
    bags: dict[str, BagAnswers] = {}
    outdated = list(stage.outdated)
    for trial in tqdm(outdated, "bag of words", unit="rule", disable=not outdated):
        splits, rule = read_splits(trial.data), trial.rule
        try:
            fitted = fit_bag_of_words(splits["train"], splits["validation"], rule)
        except GuardError as error:
            stage.leave_out(rule.id, error)
            continue
        bags[rule.id] = (fitted.variant, fitted.answers(trial.examples))
    return bags


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
    recipes = named_recipes(arguments)
    if len(recipes) > 1:
        remedy = "Name one; `make curve MODEL=tiny,minilm` puts several side by side"
        raise GuardError("rules are evaluated on one base", got=arguments.model, remedy=remedy)
    report = run(
        arguments.rule,
        recipes[0],
        seeds=arguments.seeds,
        force=arguments.force,
        judge=judge_from(os.environ),
    )
    print(report.as_markdown())
    written = [Runs().report.with_suffix(suffix) for suffix in (".json", ".md")]
    print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
