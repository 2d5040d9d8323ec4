"""The result for one rule: judge, bag of words and every method on the same test examples.

Knows nothing of how they answered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval import metrics
from eval.agreement import Agreement
from eval.answer import Answer
from eval.bag_of_words.baseline import BagVariant
from eval.contender import BAG_OF_WORDS, JUDGE, is_baseline, is_seeded
from eval.judge.record import Judgement, JudgeRecord
from eval.quality import MethodQuality, method_quality
from eval.robustness import Robustness
from eval.scored import group_numbers, is_right, unanswered
from eval.trial import Trial
from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, validate
from guard.machine.provenance import Provenance

# By seed, a string as in JSON: 1 for each example on which the verdict is right, else 0.
RightBySeed = dict[str, tuple[int, ...]]


class Difference(Strict):
    """A later method minus an earlier one, example by example, on the seeds that both have; a
    method that is not seeded has one answer, which is compared with every seed of the other's.
    """

    minuend: str
    subtrahend: str
    mcnemar_seed: int  # 0, the weights that are served, or else the first one
    mcnemar_p: float  # on that seed
    mcnemar_p_by_seed: dict[str, float]


class Evaluation(Strict):
    """Everything the report says about one rule, and what it takes to put rules together."""

    rule: str
    title: str
    model: str
    n_test: int
    n_violating: int
    limit: int | None
    seeds: tuple[int, ...]
    methods: dict[str, MethodQuality]  # by contender: the baselines, then the recipe's methods
    bag_of_words: BagVariant  # the one that was chosen
    max_fpr: float | None  # the rule's
    refusals: dict[str, int]  # by the served engine, over all seeds
    judges: dict[str, JudgeRecord]  # by contender; empty where nobody judged
    agreement: dict[str, Agreement]
    robustness: Robustness
    differences: dict[str, Difference]  # by difference_name
    right: dict[str, RightBySeed]  # by method
    groups: tuple[int, ...]  # per example
    commit: str
    hardware: str
    versions: dict[str, str]

    @property
    def trained(self) -> list[str]:
        """The names of the recipe's methods, in its order."""
        return [name for name in self.methods if not is_baseline(name)]

    def outcomes(self, name: str) -> metrics.Outcomes:
        """The named difference by seed and example, -1, 0 or 1, ready for the bootstrap."""
        difference = self.differences[name]
        minuend, subtrahend = self.right[difference.minuend], self.right[difference.subtrahend]
        by_seed = []
        for seed in difference.mcnemar_p_by_seed:
            later, earlier = _of_seed(minuend, seed), _of_seed(subtrahend, seed)
            by_seed.append(np.array(later) - np.array(earlier))
        values = np.array(by_seed, dtype=np.int8)
        return metrics.Outcomes(values, np.array(self.groups, dtype=np.int64))

    def save(self, folder: Path) -> None:
        """Write `evaluation.json`, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.model_dump(mode="json"), ensure_ascii=False)
        with atomic_write(folder / "evaluation.json") as part:
            part.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class TrialAnswers:
    """Everybody's answers, each in the order of the trial's examples; the methods' by name and
    seed.
    """

    judgement: Judgement | None
    judge_is_served: bool
    bag_of_words: tuple[BagVariant, Sequence[Answer]]
    methods: Mapping[str, Mapping[int, Sequence[Answer]]]


def load_evaluation(folder: Path) -> Evaluation:
    """The evaluation kept in `folder`.

    Raises GuardError where it is missing, torn, or has a wrong key, which is named.
    """
    path = folder / "evaluation.json"
    model, rule = folder.parts[-3:-1]
    remedy = f"Run `make eval RULE={rule} MODEL={model}`"
    if not path.is_file():
        raise GuardError("no such file", where=path, remedy=remedy)
    try:
        return validate(json.loads(path.read_bytes()), Evaluation, where=path)
    except ValueError as error:
        raise GuardError(f"not valid JSON: {error}", where=path, remedy=remedy) from error
    except GuardError as error:
        raise GuardError(error.problem, where=path, remedy=remedy) from error


def evaluate(
    trial: Trial,
    trial_answers: TrialAnswers,
    *,
    agreement: dict[str, Agreement],
    robustness: Robustness,
    provenance: Provenance,
) -> Evaluation:
    """Measure everybody's answers and compare the methods example by example."""
    right = _right(trial, trial_answers.methods)
    judgement = trial_answers.judgement
    return Evaluation(
        rule=trial.rule.id,
        title=trial.rule.title,
        model=trial.recipe.name,
        n_test=len(trial.examples),
        n_violating=sum(example.label for example in trial.examples),
        limit=trial.limit,
        seeds=trial.seeds,
        methods=_qualities(trial, trial_answers),
        bag_of_words=trial_answers.bag_of_words[0],
        max_fpr=trial.rule.max_fpr,
        refusals=_refusals(trial_answers),
        judges={} if judgement is None else {JUDGE: judgement.record},
        agreement=agreement,
        robustness=robustness,
        differences=differences_of(right),
        right=right,
        groups=tuple(group_numbers(trial.examples).tolist()),
        **provenance,
    )


def difference_name(minuend: str, subtrahend: str) -> str:
    """Its key in JSON."""
    return f"{minuend}_minus_{subtrahend}"


def differences_of(right: Mapping[str, RightBySeed]) -> dict[str, Difference]:
    """Of every two methods that have a seed to be compared on, the later one minus the earlier, by
    `difference_name`.
    """
    differences = {}
    for earlier, later in itertools.combinations(right, 2):
        p_by_seed: dict[str, float] = {}
        for seed in _compared_seeds(right, earlier, later):
            p_by_seed[seed] = metrics.mcnemar_exact_p(
                np.array(_of_seed(right[earlier], seed), dtype=bool),
                np.array(_of_seed(right[later], seed), dtype=bool),
            )
        if p_by_seed:
            seed = "0" if "0" in p_by_seed else next(iter(p_by_seed))
            differences[difference_name(later, earlier)] = Difference(
                minuend=later,
                subtrahend=earlier,
                mcnemar_seed=int(seed),
                mcnemar_p=p_by_seed[seed],
                mcnemar_p_by_seed=p_by_seed,
            )
    return differences


def _compared_seeds(right: Mapping[str, RightBySeed], earlier: str, later: str) -> list[str]:
    """The seeds that both have; all of a seeded method's where the other one is not seeded."""
    if not is_seeded(earlier):
        return list(right[later])
    if not is_seeded(later):
        return list(right[earlier])
    return [seed for seed in right[earlier] if seed in right[later]]


def _of_seed(by_seed: RightBySeed, seed: str) -> tuple[int, ...]:
    """With that seed; the only answer of a method that is not seeded."""
    return by_seed[seed] if seed in by_seed else by_seed["0"]


def _qualities(trial: Trial, trial_answers: TrialAnswers) -> dict[str, MethodQuality]:
    baselines: dict[str, Sequence[Answer]] = {}
    if trial_answers.judgement is not None:
        baselines[JUDGE] = trial_answers.judgement.answers
    bag_of_words = trial_answers.bag_of_words[1]
    baselines[BAG_OF_WORDS] = bag_of_words
    qualities = {}
    for name, answers in baselines.items():
        qualities[name] = method_quality(trial.examples, {0: answers}, name_seeds=False)
    for name, by_seed in trial_answers.methods.items():
        qualities[name] = method_quality(trial.examples, by_seed, bag_of_words=bag_of_words)
    return qualities


def _refusals(trial_answers: TrialAnswers) -> dict[str, int]:
    refusals = {JUDGE: 0}
    if trial_answers.judgement is not None and trial_answers.judge_is_served:
        refusals[JUDGE] = unanswered([trial_answers.judgement.answers])
    for name, by_seed in trial_answers.methods.items():
        refusals[name] = unanswered(by_seed.values())
    return refusals


def _right(
    trial: Trial, answers: Mapping[str, Mapping[int, Sequence[Answer]]]
) -> dict[str, RightBySeed]:
    """By method and seed, example by example."""
    right: dict[str, RightBySeed] = {}
    for name, by_seed in answers.items():
        right[name] = {}
        for seed, of_seed in by_seed.items():
            values = is_right(trial.examples, of_seed).astype(int)
            right[name][str(seed)] = tuple(values.tolist())
    return right
