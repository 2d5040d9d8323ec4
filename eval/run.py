"""Evaluate rules on one base, or on several side by side: a stage for each base, one bag of words
for all of them -> one report. Entry of `make eval`.

Knows nothing of training, or of how a rule is answered on a base.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from eval.bag_of_words.baseline import fit_bag_of_words
from eval.evaluation import Evaluation, load_evaluation
from eval.judge.judges import JUDGES, Judge, judge_from, judge_on
from eval.report.report import Report, write_report
from eval.report.side_by_side import side_by_side
from eval.served import OpenPredictor, open_engine
from eval.stage import (
    BagAnswers,
    Stage,
    StageTrials,
    earlier_evaluations,
    evaluate_outdated,
    selected_trials,
)
from eval.trial import Trial
from guard.arguments import count, whole_numbers
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, read_splits
from guard.recipe import Recipe
from guard.rule import RULES, rule_names
from guard.study import add_recipe_arguments, named_recipes


def run(
    selection: str,
    recipes: Sequence[Recipe],
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    seeds: Sequence[int] | None = None,
    limit: int | None = None,
    force: bool = False,
    judge: Judge | None = None,
    open_predictor: OpenPredictor = open_engine,
) -> Report:
    """Evaluate the selected rules on every base where their inputs changed, and write the report of
    every rule that is current on all of them.

    Without a `judge` the base itself judges, zero-shot; if it is an encoder, nobody judges. Raises
    GuardError for bad inputs before an engine starts. If `all` rules are selected, those with bad
    inputs are left out, and the report says why, as long as one remains on every base.
    """
    stages: list[Stage] = []
    for recipe in recipes:
        judged = judge_on(recipe, judge)
        stages.append(Stage(runs or Runs(), recipe, recipe.base_revision, rules, judged))
    base_trials, left_out = _base_trials(stages, selection, seeds, limit, force)
    bags, without_bag = _bags_of_words(base_trials, selection)
    left_out += [f"{name}: {error}" for name, error in without_bag.items()]
    base_trials = [stage_trials.without(without_bag) for stage_trials in base_trials]
    if not all(stage_trials.trials for stage_trials in base_trials):
        raise next(iter(without_bag.values()))
    if force:
        for stage_trials in base_trials:
            stage_trials.forget()
    base_trials, disagreements = _evaluated(base_trials, bags, selection, force, open_predictor)
    left_out += disagreements
    selected = rule_names(selection, rules)
    by_rule, reasons = _evaluations_by_rule(base_trials, selected)
    joint, incomplete = _joint(by_rule, [recipe.name for recipe in recipes], selected)
    report = Report(joint, (*left_out, *reasons, *incomplete))
    write_report(report, stages[0].runs.report)
    return report


def _base_trials(
    stages: Sequence[Stage],
    selection: str,
    seeds: Sequence[int] | None,
    limit: int | None,
    force: bool,
) -> tuple[list[StageTrials], list[str]]:
    """The trials on every base, and a line for each rule that is left out. Raises GuardError."""
    base_trials: list[StageTrials] = []
    left_out: list[str] = []
    for stage in stages:
        stage_trials, reasons = selected_trials(
            stage, selection, seeds=seeds, limit=limit, force=force
        )
        base_trials.append(stage_trials)
        left_out += reasons
    return base_trials, left_out


def _evaluations_by_rule(
    base_trials: Sequence[StageTrials], selected: Sequence[str]
) -> tuple[dict[str, list[Evaluation]], list[str]]:
    """Every rule's current evaluations, one for each base that has it, and what is left out of
    them, with the reason.

    Rules that are not selected have the evaluations of earlier runs that still hold.
    """
    by_rule: dict[str, list[Evaluation]] = {}
    left_out: list[str] = []
    for stage_trials in base_trials:
        for trial in stage_trials.trials:
            left_out += trial.left_out
        evaluations = [load_evaluation(trial.folder) for trial in stage_trials.trials]
        earlier, stale = earlier_evaluations(stage_trials.stage, selected=selected)
        left_out += stale
        for evaluation in (*evaluations, *earlier):
            by_rule.setdefault(evaluation.rule, []).append(evaluation)
    return by_rule, left_out


def _evaluated(
    base_trials: Sequence[StageTrials],
    bags: Mapping[str, BagAnswers],
    selection: str,
    force: bool,
    open_predictor: OpenPredictor,
) -> tuple[list[StageTrials], list[str]]:
    """Evaluate what is outdated on every base. Return the trials that are evaluated; of `all`
    rules, those are left out on which the engine disagrees with PEFT, with the reason.

    Raises GuardError for one that was selected by name, and where none remains on a base, once
    the others are evaluated.
    """
    evaluated: list[StageTrials] = []
    left_out: list[str] = []
    failures: list[GuardError] = []
    for stage_trials in base_trials:
        errors = evaluate_outdated(stage_trials, bags, force, open_predictor)
        remaining = stage_trials.without(errors)
        if selection != "all" or not remaining.trials:
            failures += errors.values()
        evaluated.append(remaining)
        left_out += [f"{name}: {error}" for name, error in errors.items()]
    if failures:
        raise failures[0]
    return evaluated, left_out


def _bags_of_words(
    base_trials: Sequence[StageTrials], selection: str
) -> tuple[dict[str, BagAnswers], dict[str, GuardError]]:
    """The baseline's answers by rule, which are the same on every base, and an error for each rule
    on which it cannot be fitted.

    Raises that error if the rule was selected by name.
    """
    trials: dict[str, Trial] = {}
    for stage_trials in base_trials:
        trials |= {trial.rule.id: trial for trial in stage_trials.outdated}
    bags: dict[str, BagAnswers] = {}
    errors: dict[str, GuardError] = {}
    for name, trial in tqdm(trials.items(), "bag of words", unit="rule", disable=not trials):
        try:
            bags[name] = _bag_of_words(trial)
        except GuardError as error:
            if selection != "all":
                raise
            errors[name] = error
    return bags, errors


def _bag_of_words(trial: Trial) -> BagAnswers:
    """The baseline fitted on the rule's other splits, and its answers.

    Raises GuardError where it cannot be fitted on them.
    """
    splits = read_splits(trial.data)
    fitted = fit_bag_of_words(
        splits["train"], splits["validation"], trial.rule.reads, trial.rule.max_fpr
    )
    return fitted.variant, fitted.answers(trial.examples)


def _joint(
    by_rule: Mapping[str, Sequence[Evaluation]], models: Sequence[str], selected: Sequence[str]
) -> tuple[tuple[Evaluation, ...], list[str]]:
    """The rules that are evaluated on all bases, each as one evaluation, sorted by name; and a line
    for each of the others that says why it is left out.

    Raises GuardError where no rule is left, or a selected one cannot be put side by side.
    """
    joint: list[Evaluation] = []
    incomplete: list[str] = []
    for rule, evaluations in sorted(by_rule.items()):
        if len(evaluations) < len(models):
            on = ", ".join(evaluation.model for evaluation in evaluations)
            incomplete.append(f"{rule}: evaluated on {on} alone")
            continue
        try:
            joint.append(side_by_side(evaluations))
        except GuardError as error:
            if rule in selected:
                raise
            incomplete.append(f"{rule}: {error}")
    if not joint:
        raise GuardError(
            f"no rule is evaluated on all of {', '.join(models)}",
            got="; ".join(incomplete),
            remedy=f"Run `make train eval MODEL=…` of one rule for each of {', '.join(models)}",
        )
    return tuple(joint), incomplete


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description="Quality table: LLM judge, bag of words and the recipe's methods on the same "
        "test examples. Writes runs/report.{json,md,png}.",
        epilog="The judge is an OpenAI-compatible endpoint if JUDGE_BASE_URL and JUDGE_MODEL are "
        "set (also: JUDGE_API_KEY, JUDGE_OPTIONS, JUDGE_CONCURRENCY, JUDGE_TIMEOUT_S, "
        "JUDGE_PRICE_IN, JUDGE_PRICE_OUT; see guard/endpoint/settings.py), otherwise the base "
        "model, zero-shot.",
    )
    parser.add_argument(
        "--rule", required=True, help="a rule's name, several separated by commas, or all"
    )
    add_recipe_arguments(parser)
    parser.add_argument(
        "--seeds",
        type=whole_numbers,
        help="for example 0,1,2 (default: every seed that all methods were trained with)",
    )
    parser.add_argument(
        "--limit",
        type=count,
        help="only this many test examples of each rule, drawn evenly; the report says so",
    )
    parser.add_argument(
        "--judge",
        choices=JUDGES,
        help="who judges (default: the first that the environment describes)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="ask the engine again even where nothing changed; answers of a paid judge are kept",
    )
    return parser


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _parser().parse_args()
    report = run(
        arguments.rule,
        named_recipes(arguments),
        seeds=arguments.seeds,
        limit=arguments.limit,
        force=arguments.force,
        judge=judge_from(os.environ, arguments.judge),
    )
    print(report.as_markdown())
    written = [Runs().report.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
