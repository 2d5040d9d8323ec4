"""Rules evaluated on one base: their trials -> engine, judge and the bag of words' answers -> an
evaluation of each that is kept until its inputs change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval.agreement import Agreement, agreement
from eval.answers import Answer
from eval.bag_of_words import BagVariant
from eval.evaluation import Evaluation, evaluate, load_evaluation
from eval.judge.judges import Judge
from eval.served import OpenPredictor, Served, answering_code, score_missing
from eval.trial import Trial, answering_recipe, load_trial
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs, fingerprint, is_current, mark_current, not_current, running_code
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
    ROOT / "data/generator/dimensions.py",
)

BagAnswers = tuple[BagVariant, list[Answer]]  # of one rule: the variant that was chosen answers


@dataclass
class Stage:
    """The trials of a selection on one base, the outdated ones, and why a rule is left out."""

    runs: Runs
    recipe: Recipe
    judge: Judge
    rules: Path
    selection: str
    trials: list[Trial] = field(default_factory=list)
    outdated: list[Trial] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._base_revision = self.recipe.base_revision  # a hash of the whole base

    def select(self, seeds: Sequence[int] | None = None, *, force: bool = False) -> None:
        """Find the trials; `force`: all are outdated. Raises GuardError for bad inputs."""
        for name in rule_names(self.selection, self.rules):
            try:
                revision, rules = self._base_revision, self.rules
                trial = load_trial(self.runs, self.recipe, revision, name, seeds=seeds, rules=rules)
                self.trials.append(trial)
            except GuardError as error:
                if self.selection != "all":
                    raise
                self.left_out.append(f"{name}: {error}")
        if not self.trials:
            problem = "no rule can be evaluated"
            got = "; ".join(self.left_out)
            remedy = f"Run `make data RULE=all` and `make train RULE=all MODEL={self.recipe.name}`"
            raise GuardError(problem, where=self.runs.root, got=got, remedy=remedy)
        self.outdated = [trial for trial in self.trials if force or not self._is_evaluated(trial)]

    def leave_out(self, rule: str, error: GuardError) -> None:
        """Go on without a rule. Raises its error if it was selected by name, or is the last."""
        self.trials = [trial for trial in self.trials if trial.rule.id != rule]
        self.outdated = [trial for trial in self.outdated if trial.rule.id != rule]
        if self.selection != "all" or not self.trials:
            raise error
        self.left_out.append(f"{rule}: {error}")

    def forget(self) -> None:
        """Take back that trials are evaluated: a forced run that is interrupted goes on without."""
        for trial in self.outdated:
            not_current(trial.folder)

    def evaluate_outdated(
        self, bags: Mapping[str, BagAnswers], force: bool, open_predictor: OpenPredictor
    ) -> None:
        """Evaluate the outdated trials and keep the evaluations; `bags` has the baseline's answers
        by rule. `force`: the engine is asked again. Leaves out, once all others are evaluated, the
        rules on which engine and PEFT disagree. Whatever costs nothing comes before a judge is
        paid.
        """
        served = [Served(trial, with_base=self.judge.is_served) for trial in self.outdated]
        if force:
            for kept in served:
                kept.forget()
        score_missing(served, answering_recipe(self.recipe), open_predictor)
        errors: dict[str, GuardError] = {}
        agreed: list[tuple[Served, dict[str, Agreement]]] = []
        for rule in served:
            try:
                agreed.append((rule, _agreements(rule)))
            except GuardError as error:
                errors[rule.trial.rule.id] = error
        for rule, agreements in agreed:
            evaluation = self._evaluate(rule, bags[rule.trial.rule.id], agreements)
            evaluation.save(rule.trial.folder)
            mark_current(rule.trial.folder, self._inputs(rule.trial))
        for name, problem in errors.items():
            self.leave_out(name, problem)

    def _inputs(self, trial: Trial) -> str:
        return fingerprint(trial.inputs, self.judge.identity, answering_code(), running_code(CODE))

    def _is_evaluated(self, trial: Trial) -> bool:
        """Whether a readable evaluation is kept that still holds."""
        if not is_current(trial.folder, self._inputs(trial)):
            return False
        try:
            load_evaluation(trial.folder)
        except GuardError:  # torn or deleted: it is made again from the kept answers
            return False
        return True

    def _evaluate(
        self, rule: Served, bag_of_words: BagAnswers, agreements: dict[str, Agreement]
    ) -> Evaluation:
        judgement = self.judge.judge(rule, self.runs.root / "judge")
        methods = {method: rule.answers_by_seed(method) for method in rule.trial.methods}
        return evaluate(
            rule.trial,
            judgement,
            bag_of_words,
            methods,
            agreement=agreements,
            provenance=provenance(),
        )


def _agreements(answers: Served) -> dict[str, Agreement]:
    """The engine against PEFT, by method. Raises GuardError where they disagree."""
    agreements, trial = {}, answers.trial
    precision = trial.recipe.serving_quantization or trial.recipe.serving_dtype
    for method in trial.methods:
        contestants = trial.by_seed(method).values()
        served = [(contestant, answers.rows(contestant)) for contestant in contestants]
        agreements[method] = agreement(served, precision)
    return agreements
