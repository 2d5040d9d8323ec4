"""Who answers: the baselines and the methods, by name; and their answers on a rule's test examples,
held against the labels as arrays. In a table of several bases a name starts with the base: `lora`
there is `minilm/lora`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.metrics import Outcomes
from guard.conversation.example import Example
from guard.method import METHODS


@dataclass(frozen=True)
class Answer:
    """A decision on one example, with the evidence for it. `violates` is None where there is no
    usable answer (the engine refused, the judge rambled): it counts as wrong, never as "allow".
    `logit` (nats, uncalibrated), `p_violation` (calibrated) and `confident` (`Verdict` says of
    what) are None where the method does not state them.
    """

    violates: bool | None
    logit: float | None = None
    p_violation: float | None = None
    confident: bool | None = None


@dataclass(frozen=True)
class Scored:
    """Answers beside the labels, as arrays over the examples; NaN where an answer does not state
    the value. `decisions`: 1 where flagged; the wrong decision where there is no answer.
    """

    labels: NDArray[np.int64]  # 1 where the rule is violated
    groups: NDArray[np.int64]
    decisions: NDArray[np.int64]
    is_answered: NDArray[np.bool_]
    logits: NDArray[np.float64]  # nats
    p_violation: NDArray[np.float64]
    confident: NDArray[np.float64]  # 1 or 0

    @property
    def is_right(self) -> NDArray[np.bool_]:
        right: NDArray[np.bool_] = self.decisions == self.labels
        return right

    def part(self, chosen: Sequence[int] | NDArray[np.bool_]) -> Scored:
        return Scored(*(values[chosen] for values in vars(self).values()))


def scored_answers(
    labels: Sequence[int], answers: Sequence[Answer], groups: Sequence[int] | NDArray[np.int64]
) -> Scored:
    truth = np.array(labels, dtype=np.int64)
    violates = np.array([answer.violates for answer in answers], dtype=np.float64)
    return Scored(
        labels=truth,
        groups=np.array(groups, dtype=np.int64),
        decisions=np.where(np.isnan(violates), 1 - truth, violates).astype(np.int64),
        is_answered=~np.isnan(violates),
        logits=np.array([answer.logit for answer in answers], dtype=np.float64),
        p_violation=np.array([answer.p_violation for answer in answers], dtype=np.float64),
        confident=np.array([answer.confident for answer in answers], dtype=np.float64),
    )


def outcomes(scored: Sequence[Scored]) -> Outcomes:
    values = np.array([of_seed.is_right for of_seed in scored], dtype=np.int8)
    return Outcomes(values, scored[0].groups)


def group_numbers(examples: Sequence[Example]) -> NDArray[np.int64]:
    groups = dict.fromkeys(example.group for example in examples)
    number_of_group = {group: number for number, group in enumerate(groups)}
    return np.array([number_of_group[example.group] for example in examples], dtype=np.int64)


def unanswered(by_seed: Iterable[Sequence[Answer]]) -> int:
    return sum(answer.violates is None for answer in itertools.chain.from_iterable(by_seed))


JUDGE = "judge"
BAG_OF_WORDS = "bag_of_words"
BASELINES = {JUDGE: "judge", BAG_OF_WORDS: "bag of words"}  # not trained by us


def on_base(model: str, name: str) -> str:
    return f"{model}/{name}"


def is_baseline(contender: str) -> bool:
    return _split(contender)[1] in BASELINES


def is_seeded(contender: str) -> bool:
    return METHODS[_split(contender)[1]].is_seeded


def label_of(contender: str) -> str:
    model, name = _split(contender)
    label = BASELINES.get(name) or METHODS[name].label
    return f"{model} {label}".strip()


def _split(contender: str) -> tuple[str, str]:
    model, _, name = contender.rpartition("/")
    return model, name
