"""The result for one rule: judge, bag of words and every method on the same test examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval import metrics
from eval.agreement import Agreement
from eval.answers import (
    BAG_OF_WORDS,
    JUDGE,
    Answer,
    group_numbers,
    is_baseline,
    is_seeded,
    unanswered,
)
from eval.bag_of_words import BagVariant
from eval.judge.answer import Judgement, JudgeRecord
from eval.quality import MethodQuality, method_quality
from eval.trial import Trial
from guard.conversation.example import Example
from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, validate
from guard.layout import fingerprint
from guard.machine.provenance import Provenance
from guard.weights.card import COMPOSITION

# By seed, a string as in JSON: 1 for each example on which the verdict is right, else 0.
RightBySeed = dict[str, tuple[int, ...]]


class Evaluation(Strict):
    """Everything the report says about one rule, and what it takes to put rules together."""

    rule: str
    model: str
    n_test: int
    n_violating: int
    seeds: tuple[int, ...]
    methods: dict[str, MethodQuality]  # by contender: the baselines, then the recipe's methods
    bag_of_words: BagVariant  # the one that was chosen
    max_fpr: float | None  # the rule's
    refusals: dict[str, int]  # by the served engine, over all seeds
    judges: dict[str, JudgeRecord]  # by contender; empty where nobody judged
    agreement: dict[str, Agreement]
    right: dict[str, RightBySeed]  # by method
    test_rows: str  # a fingerprint of the conversations and their labels
    composition: dict[str, dict[str, Any]]  # a composed rule's by method, of seed 0, from its cards
    groups: tuple[int, ...]  # per example
    commit: str
    hardware: str
    versions: dict[str, str]

    @property
    def trained(self) -> list[str]:
        return [name for name in self.methods if not is_baseline(name)]

    def difference(self, later: str, earlier: str) -> metrics.Outcomes | None:
        """A later method minus an earlier one by seed and example: -1, 0 or 1. None where they have
        no seed in common. A method that is not seeded has one answer, which is compared with every
        seed of the other's.
        """
        later_right, earlier_right = self.right[later], self.right[earlier]
        seeds = [seed for seed in later_right if seed in earlier_right]
        if not is_seeded(earlier):
            seeds = list(later_right)
        elif not is_seeded(later):
            seeds = list(earlier_right)
        if not seeds:
            return None
        minuend = [later_right.get(seed) or later_right["0"] for seed in seeds]
        subtrahend = [earlier_right.get(seed) or earlier_right["0"] for seed in seeds]
        values = np.array(minuend, dtype=np.int8) - np.array(subtrahend, dtype=np.int8)
        return metrics.Outcomes(values, np.array(self.groups, dtype=np.int64))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.model_dump(mode="json"), ensure_ascii=False)
        with atomic_write(folder / "evaluation.json") as part:
            part.write_text(text + "\n", encoding="utf-8")


def load_evaluation(folder: Path) -> Evaluation:
    """The kept evaluation. Raises GuardError where it is missing, torn, or has a wrong key."""
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
    judgement: Judgement | None,
    bag_of_words: tuple[BagVariant, Sequence[Answer]],
    methods: Mapping[str, Mapping[int, Sequence[Answer]]],
    *,
    agreement: dict[str, Agreement],
    provenance: Provenance,
) -> Evaluation:
    """Measure everybody's answers, in the order of the trial's examples, by name and seed."""
    examples, (variant, bag_answers) = trial.examples, bag_of_words
    qualities: dict[str, MethodQuality] = {}
    judges: dict[str, JudgeRecord] = {}
    refusals = {JUDGE: 0}
    if judgement is not None:
        judges[JUDGE] = judgement.record
        qualities[JUDGE] = method_quality(examples, {0: judgement.answers})
        if judgement.record.endpoint is None:
            refusals[JUDGE] = unanswered([judgement.answers])
    qualities[BAG_OF_WORDS] = method_quality(examples, {0: bag_answers})
    for name, by_seed in methods.items():
        qualities[name] = method_quality(examples, by_seed, bag_answers)
        refusals[name] = unanswered(by_seed.values())
    return Evaluation(
        rule=trial.rule.id,
        model=trial.recipe.name,
        n_test=len(examples),
        n_violating=sum(example.label for example in examples),
        seeds=trial.seeds,
        methods=qualities,
        bag_of_words=variant,
        max_fpr=trial.rule.max_fpr,
        refusals=refusals,
        judges=judges,
        agreement=agreement,
        right={name: _right(examples, by_seed) for name, by_seed in methods.items()},
        groups=tuple(group_numbers(examples).tolist()),
        test_rows=fingerprint([[example.messages, example.label] for example in examples]),
        composition={
            weights.method: weights.card.metrics[COMPOSITION]
            for weights in trial.contestants
            if weights.card.composed_of and not weights.seed
        },
        **provenance,
    )


def _right(examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]]) -> RightBySeed:
    """A missing answer is wrong."""
    right: RightBySeed = {}
    for seed, answers in by_seed.items():
        rows = zip(examples, answers, strict=True)
        right[str(seed)] = tuple(int(answer.violates == bool(it.label)) for it, answer in rows)
    return right
