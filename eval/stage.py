"""Rules evaluated on one base: their trials -> engine, judge and the bag of words' answers -> an
evaluation of each that is kept until its inputs change.

Knows nothing of other bases, of reports or of the command line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.agreement import Agreement, agreement
from eval.answer import Answer
from eval.bag_of_words.baseline import BagVariant
from eval.evaluation import Evaluation, TrialAnswers, evaluate, load_evaluation
from eval.judge.judges import Judge
from eval.robustness import Perturbation, Robustness, perturbations, perturbed_trial, robustness
from eval.served import OpenPredictor, Served, answering_code, score_missing
from eval.trial import Trial, answering_recipe, load_trial
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import (
    Runs,
    fingerprint,
    is_current,
    mark_current,
    not_current,
    running_code,
)
from guard.machine.provenance import provenance
from guard.recipe import Recipe
from guard.rule import rule_names

# What turns answers into figures, besides the code that makes the answers.
CODE = (
    *sorted((ROOT / "eval").rglob("*.py")),
    ROOT / "guard/calibration_rows.py",
    ROOT / "guard/conversation/example.py",
    ROOT / "guard/rule.py",
    ROOT / "guard/verdict.py",
    ROOT / "guard/prompt/text.py",
    *sorted((ROOT / "data/generator").glob("*.py")),
)

BagAnswers = tuple[BagVariant, list[Answer]]  # of one rule: the variant that was chosen answers


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
        return fingerprint(trial.inputs, self.judge.identity, answering_code(), running_code(CODE))

    def is_evaluated(self, trial: Trial) -> bool:
        """Whether a readable evaluation is kept that still holds."""
        if not is_current(trial.folder, self.inputs(trial)):
            return False
        try:
            load_evaluation(trial.folder)
        except GuardError:  # torn or deleted: it is made again from the kept answers
            return False
        return True


@dataclass(frozen=True)
class StageTrials:
    """The selected rules' trials on one base, and those of them that are to be evaluated."""

    stage: Stage
    trials: Sequence[Trial]
    outdated: Sequence[Trial]

    def forget(self) -> None:
        """Take back that they are evaluated: a forced run that is interrupted goes on without."""
        for trial in self.outdated:
            not_current(trial.folder)

    def without(self, rules: Collection[str]) -> StageTrials:
        """All but those of the given rules."""
        trials = [trial for trial in self.trials if trial.rule.id not in rules]
        outdated = [trial for trial in self.outdated if trial.rule.id not in rules]
        return StageTrials(self.stage, trials, outdated)


def selected_trials(
    stage: Stage,
    selection: str,
    *,
    seeds: Sequence[int] | None = None,
    limit: int | None = None,
    force: bool = False,
) -> tuple[StageTrials, list[str]]:
    """The selected rules' trials, and of `all` rules those that are left out, with the reason.
    `force`: every trial is to be evaluated.

    Raises GuardError for bad inputs of a rule that was selected by name, and if none remains.
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
    outdated = [trial for trial in trials if force or not stage.is_evaluated(trial)]
    return StageTrials(stage, trials, outdated), left_out


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


def evaluate_outdated(
    on_base: StageTrials,
    bags: Mapping[str, BagAnswers],
    force: bool,
    open_predictor: OpenPredictor,
) -> dict[str, GuardError]:
    """Evaluate the outdated trials and keep the evaluations; `bags` has the baseline's answers by
    rule. `force`: the engine is asked again. Return why a rule is not evaluated, by rule: engine
    and PEFT disagree there.

    Whatever costs nothing comes before a judge is paid.
    """
    stage = on_base.stage
    answers = [RuleAnswers(trial, stage.judge.is_served) for trial in on_base.outdated]
    served = [rule.plain for rule in answers] + [rule.perturbed for rule in answers]
    if force:
        for kept in served:
            kept.forget()
    score_missing(served, answering_recipe(stage.recipe), open_predictor)
    errors: dict[str, GuardError] = {}
    agreements: list[tuple[RuleAnswers, dict[str, Agreement]]] = []
    for rule in answers:
        try:
            agreements.append((rule, rule.agreement()))
        except GuardError as error:
            errors[rule.trial.rule.id] = error
    for rule, agreed in agreements:
        evaluation = _evaluate(stage, rule, bags[rule.trial.rule.id], agreed)
        evaluation.save(rule.trial.folder)
        mark_current(rule.trial.folder, stage.inputs(rule.trial))
    return errors


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


def earlier_evaluations(
    stage: Stage, *, selected: Sequence[str]
) -> tuple[list[Evaluation], list[str]]:
    """The evaluations of other rules that are kept on this base and still hold, and for each that
    does not, why.
    """
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
