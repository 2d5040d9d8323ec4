"""Evaluate rules: test examples -> served engine, judge, bag of words -> metrics -> one report.

Knows nothing of training or of serving's insides.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from eval.agreement import Agreement, agreement
from eval.answer import Answer
from eval.bag_of_words.baseline import BagVariant, fit_bag_of_words
from eval.evaluation import Evaluation, TrialAnswers, evaluate, load_evaluation
from eval.judge.judges import JUDGES, Judge, judge_from, judge_on
from eval.report.report import Report, write_report
from eval.report.side_by_side import side_by_side
from eval.robustness import Perturbation, Robustness, perturbations, perturbed_trial, robustness
from eval.served import OpenPredictor, Served, answering_code, open_engine, score_missing
from eval.trial import Trial, answering_recipe, load_trial
from guard.arguments import count, whole_numbers
from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT, Runs, fingerprint, is_current, mark_current, read_splits
from guard.machine.provenance import provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, rule_names

# What turns answers into figures, besides the code that makes the answers.
CODE = (
    *sorted((ROOT / "eval").rglob("*.py")),
    ROOT / "guard/calibration_rows.py",
    ROOT / "guard/rule.py",
    ROOT / "guard/verdict.py",
    ROOT / "guard/prompt/text.py",
    *sorted((ROOT / "data/generator").glob("*.py")),
)


@dataclass(frozen=True)
class Stage:
    """What evaluating a rule on one base takes besides the rule."""

    runs: Runs
    recipe: Recipe
    base_revision: str
    rules: Path
    judge: Judge

    def trial(
        self, name: str, seeds: Sequence[int] | None = None, limit: int | None = None
    ) -> Trial:
        """The rule's trial. Raises GuardError for bad inputs."""
        return load_trial(
            self.runs,
            self.recipe,
            self.base_revision,
            name,
            seeds=seeds,
            limit=limit,
            rules=self.rules,
        )

    def inputs(self, trial: Trial) -> str:
        """Fingerprint of everything an evaluation depends on."""
        return fingerprint(trial.inputs, self.judge.identity, answering_code(), *CODE)

    def is_evaluated(self, trial: Trial) -> bool:
        """Whether a readable evaluation is kept that still holds."""
        if not is_current(trial.folder, self.inputs(trial)):
            return False
        try:
            load_evaluation(trial.folder)
        except GuardError:  # torn or deleted: it is made again from the kept answers
            return False
        return True


class RuleAnswers:
    """The engine's answers on one rule: its test examples, and their perturbations put to the
    weights that are served.
    """

    def __init__(self, trial: Trial, with_base: bool) -> None:
        self.trial = trial
        self.plain = Served(trial, with_base=with_base)
        self.perturbations: list[Perturbation] = perturbations(trial)
        self.perturbed = Served(perturbed_trial(trial, self.perturbations), with_base=False)

    def agreement(self) -> dict[str, Agreement]:
        """The engine against PEFT, by method. Raises GuardError where they disagree."""
        agreements = {}
        for method in self.trial.methods:
            contestants = self.trial.by_seed(method).values()
            served = [(contestant, self.plain.rows(contestant)) for contestant in contestants]
            agreements[method] = agreement(served, self.trial.recipe.serving_dtype)
        return agreements

    def robustness(self) -> Robustness:
        """Of the weights that are served."""
        plain, perturbed = {}, {}
        for method in self.trial.methods:
            contestant = self.trial.served(method)
            plain[method] = self.plain.answers(contestant)
            perturbed[method] = self.perturbed.answers(contestant)
        return robustness(self.trial, self.perturbations, plain, perturbed)


@dataclass(frozen=True)
class StageTrials:
    """The selected rules' trials on one base, and those of them that are to be evaluated."""

    stage: Stage
    trials: Sequence[Trial]
    outdated: Sequence[Trial]

    def without(self, rules: Collection[str]) -> StageTrials:
        """All but those of the given rules."""
        trials = [trial for trial in self.trials if trial.rule.id not in rules]
        outdated = [trial for trial in self.outdated if trial.rule.id not in rules]
        return StageTrials(self.stage, trials, outdated)


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

    Without a `judge` a base itself judges, zero-shot, and if it is an encoder nobody. Raises
    GuardError for bad inputs before an engine starts; of `all` rules, those with bad inputs are
    left out, and the report says why, as long as one remains on every base.
    """
    stages: list[Stage] = []
    for recipe in recipes:
        judged = judge_on(recipe, judge)
        stages.append(Stage(runs or Runs(), recipe, recipe.base_revision, rules, judged))
    on_bases, left_out = _on_bases(stages, selection, seeds, limit, force)
    bags, without_bag = _bags_of_words(on_bases, selection)
    left_out += [f"{name}: {error}" for name, error in without_bag.items()]
    on_bases = [on_base.without(without_bag) for on_base in on_bases]
    if not all(on_base.trials for on_base in on_bases):
        raise next(iter(without_bag.values()))
    for on_base in on_bases:
        _evaluate_all(on_base, bags, force, open_predictor)
    selected = rule_names(selection, rules)
    by_rule: dict[str, list[Evaluation]] = {}
    for on_base in on_bases:
        for trial in on_base.trials:
            left_out += trial.left_out
        evaluations = [load_evaluation(trial.folder) for trial in on_base.trials]
        earlier, no_longer = _other_rules(on_base.stage, selected=selected)
        left_out += no_longer
        for evaluation in (*evaluations, *earlier):
            by_rule.setdefault(evaluation.rule, []).append(evaluation)
    joint, not_joint = _joint(by_rule, [recipe.name for recipe in recipes], selected)
    report = Report(joint, (*left_out, *not_joint))
    write_report(report, stages[0].runs.report)
    return report


def _joint(
    by_rule: Mapping[str, Sequence[Evaluation]], models: Sequence[str], selected: Sequence[str]
) -> tuple[tuple[Evaluation, ...], list[str]]:
    """The rules that are evaluated on all bases, each as one evaluation, in the order of their
    names; and what there is to say of the others.

    Raises GuardError where there is none, or a selected one cannot be put side by side.
    """
    joint: list[Evaluation] = []
    not_joint: list[str] = []
    for rule, evaluations in sorted(by_rule.items()):
        if len(evaluations) < len(models):
            on = ", ".join(evaluation.model for evaluation in evaluations)
            not_joint.append(f"{rule}: evaluated on {on} alone")
            continue
        try:
            joint.append(side_by_side(evaluations))
        except GuardError as error:
            if rule in selected:
                raise
            not_joint.append(f"{rule}: {error}")
    if not joint:
        raise GuardError(
            f"no rule is evaluated on all of {', '.join(models)}",
            got="; ".join(not_joint),
            remedy=f"Run `make train eval MODEL=…` of one rule for each of {', '.join(models)}",
        )
    return tuple(joint), not_joint


def _on_bases(
    stages: Sequence[Stage],
    selection: str,
    seeds: Sequence[int] | None,
    limit: int | None,
    force: bool,
) -> tuple[list[StageTrials], list[str]]:
    """Every base's trials, and what is left out of them, with the reason. Raises GuardError."""
    on_bases: list[StageTrials] = []
    left_out: list[str] = []
    for stage in stages:
        trials, reasons = _trials(stage, selection, seeds, limit)
        outdated = [trial for trial in trials if force or not stage.is_evaluated(trial)]
        on_bases.append(StageTrials(stage, trials, outdated))
        left_out += reasons
    return on_bases, left_out


def _trials(
    stage: Stage, selection: str, seeds: Sequence[int] | None, limit: int | None
) -> tuple[list[Trial], list[str]]:
    """The trials of the selected rules, and of `all` those that are left out, with the reason.

    Raises GuardError if none remains.
    """
    trials: list[Trial] = []
    left_out: list[str] = []
    for name in rule_names(selection, stage.rules):
        try:
            trials.append(stage.trial(name, seeds, limit))
        except GuardError as error:
            if selection != "all":
                raise
            left_out.append(f"{name}: {error}")
    if not trials:
        raise GuardError(
            "no rule can be evaluated",
            where=stage.runs.root,
            got="; ".join(left_out),
            remedy=f"Run `make data RULE=all` and `make train RULE=all MODEL={stage.recipe.name}`",
        )
    return trials, left_out


BagAnswers = tuple[BagVariant, list[Answer]]


def _bags_of_words(
    on_bases: Sequence[StageTrials], selection: str
) -> tuple[dict[str, BagAnswers], dict[str, GuardError]]:
    """The baseline's answers by rule, which are the same on every base; of `all` rules, those on
    which it cannot be fitted, and why.

    Raises GuardError for one that was selected by name.
    """
    trials: dict[str, Trial] = {}
    for on_base in on_bases:
        trials |= {trial.rule.id: trial for trial in on_base.outdated}
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


def _evaluate_all(
    on_base: StageTrials,
    bags: Mapping[str, BagAnswers],
    force: bool,
    open_predictor: OpenPredictor,
) -> None:
    """Evaluate and keep. Whatever costs nothing comes before a judge is paid."""
    stage = on_base.stage
    answers = [RuleAnswers(trial, stage.judge.is_served) for trial in on_base.outdated]
    served = [rule.plain for rule in answers] + [rule.perturbed for rule in answers]
    if force:
        for kept in served:
            kept.forget()
    score_missing(served, answering_recipe(stage.recipe), open_predictor)
    agreements = [rule.agreement() for rule in answers]
    for rule, agreed in zip(answers, agreements, strict=True):
        evaluation = _evaluate(stage, rule, bags[rule.trial.rule.id], agreed)
        evaluation.save(rule.trial.folder)
        mark_current(rule.trial.folder, stage.inputs(rule.trial))


def _bag_of_words(trial: Trial) -> BagAnswers:
    """The baseline fitted on the rule's other splits, and its answers.

    Raises GuardError where these do not do.
    """
    splits = read_splits(trial.data)
    fitted = fit_bag_of_words(
        splits["train"], splits["validation"], trial.rule.reads, trial.rule.max_fpr
    )
    return fitted.variant, fitted.answers(trial.examples)


def _evaluate(
    stage: Stage,
    rule: RuleAnswers,
    bag_of_words: BagAnswers,
    agreed: dict[str, Agreement],
) -> Evaluation:
    judgement = stage.judge.judge(rule.plain, stage.runs.root / "judge")
    methods = {method: rule.plain.answers_by_seed(method) for method in rule.trial.methods}
    return evaluate(
        rule.trial,
        TrialAnswers(judgement, stage.judge.is_served, bag_of_words, methods),
        agreement=agreed,
        robustness=rule.robustness(),
        provenance=provenance(),
    )


def _other_rules(stage: Stage, *, selected: Sequence[str]) -> tuple[list[Evaluation], list[str]]:
    """Earlier evaluations on this base that still hold, and for each that does not, why."""
    current, left_out = [], []
    for path in sorted((stage.runs.root / stage.recipe.name).glob("*/eval/stage.json")):
        name = path.parent.parent.name
        if name in selected:
            continue
        try:
            earlier = load_evaluation(path.parent)
            trial = stage.trial(name, earlier.seeds, earlier.limit)
        except GuardError as error:
            left_out.append(f"{name}: {error}")
            continue
        if is_current(path.parent, stage.inputs(trial)):
            current.append(earlier)
        else:
            remedy = f"run `make eval RULE={name} MODEL={stage.recipe.name}`"
            left_out.append(f"{name}: its data, adapters or judge changed since; {remedy}")
    return current, left_out


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
    parser.add_argument(
        "--model",
        default="tiny",
        help="a recipe in recipes/models (default: tiny); several separated by commas stand side "
        "by side in one table",
    )
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
        help="ask the engine again even where nothing changed; paid judge's answers are kept",
    )
    return parser


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _parser().parse_args()
    report = run(
        arguments.rule,
        [load_recipe(name) for name in dict.fromkeys(arguments.model.split(","))],
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
