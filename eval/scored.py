"""One method's answers on a rule's test examples, held against the labels, as arrays.

Knows nothing of metrics, or of who answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.answer import Answer
from eval.metrics import Outcomes
from guard.conversation.example import Example


@dataclass(frozen=True)
class Scored:
    """Answers beside the labels, as arrays.

    `labels` and `decisions` cover all examples, the others only those that have such a value.
    """

    labels: np.ndarray  # int, [examples]: 1 where the rule is violated
    # int, [examples]: 1 where flagged; the wrong decision where there is no answer
    decisions: np.ndarray
    ranked_labels: np.ndarray  # of the examples with a logit
    logits: np.ndarray  # nats
    p_labels: np.ndarray  # of the examples with a probability
    p_violation: np.ndarray
    is_confident: np.ndarray  # bool, of the answers that say so
    is_right_where_confident: np.ndarray  # bool, of the confident answers

    @property
    def has_both_labels(self) -> bool:
        """Whether there are rows of either label. Rows that were chosen by their label say nothing
        about a probability.
        """
        return len(np.unique(self.labels)) == 2


def scored_answers(labels: Sequence[int], answers: Sequence[Answer]) -> Scored:
    """The answers as arrays beside the labels, both in the order of the examples."""
    truth = np.array(labels)
    decisions = np.array(
        [_decision(label, answer.violates) for label, answer in zip(labels, answers, strict=True)]
    )
    has_logit = np.array([answer.logit is not None for answer in answers], dtype=bool)
    has_p = np.array([answer.p_violation is not None for answer in answers], dtype=bool)
    confident = np.array([bool(answer.confident) for answer in answers], dtype=bool)
    states_confidence = np.array([answer.confident is not None for answer in answers], dtype=bool)
    return Scored(
        labels=truth,
        decisions=decisions,
        ranked_labels=truth[has_logit],
        logits=np.array([answer.logit for answer in answers])[has_logit].astype(float),
        p_labels=truth[has_p],
        p_violation=np.array([answer.p_violation for answer in answers])[has_p].astype(float),
        is_confident=confident[states_confidence],
        is_right_where_confident=(decisions == truth)[confident],
    )


def _decision(label: int, violates: bool | None) -> int:
    """The decision, 0 or 1; the wrong one where there is no usable answer."""
    if violates is None:
        return 1 - label
    return int(violates)


def outcomes(examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]]) -> Outcomes:
    """Whether each answer is right, by seed and example. A missing answer counts as wrong."""
    values = np.array([is_right(examples, answers) for answers in by_seed.values()], dtype=np.int8)
    return Outcomes(values, group_numbers(examples))


def is_right(examples: Sequence[Example], answers: Sequence[Answer]) -> np.ndarray:
    """Whether each answer is right, bool [examples]. A missing answer counts as wrong."""
    rows = zip(answers, examples, strict=True)
    return np.array([answer.violates == bool(example.label) for answer, example in rows])


def group_numbers(examples: Sequence[Example]) -> np.ndarray:
    """The examples' groups, numbered from 0 in the order in which they come."""
    groups = dict.fromkeys(example.group for example in examples)
    number_of_group = {group: number for number, group in enumerate(groups)}
    return np.array([number_of_group[example.group] for example in examples], dtype=np.int64)


def unanswered(by_seed: Iterable[Sequence[Answer]]) -> int:
    """The number of missing answers, over all seeds."""
    return sum(answer.violates is None for answer in itertools.chain.from_iterable(by_seed))
