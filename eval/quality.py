"""How good one method's answers on a rule's test examples are.

Knows nothing of who answered, or of other methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from data.generator.dimensions import Difficulty
from eval import metrics
from eval.answer import Answer
from guard.example import Example
from guard.files.yaml_file import Strict
from guard.verdict import expected_calibration_error

HARD_NEGATIVES = "hard negatives"
# `meta.stance` of allowed rows that come close to a violation
LOOKS_LIKE = ("quotes", "supposes", "resembles", "asks", "does")


@dataclass(frozen=True)
class Scored:
    """Answers beside the labels, as arrays.

    All but the first two cover only the examples that have what they hold.
    """

    labels: np.ndarray  # int, [examples]: 1 where the rule is violated
    # int, [examples]: 1 where flagged; where there is no answer, the wrong one
    decisions: np.ndarray
    ranked_labels: np.ndarray  # of the examples with a logit
    logits: np.ndarray  # nats
    p_labels: np.ndarray  # of the examples with a probability
    p_violation: np.ndarray
    is_confident: np.ndarray  # bool, of the answers that say so
    is_right_where_confident: np.ndarray  # bool, of the confident answers

    @property
    def has_both_labels(self) -> bool:
        """Whether there are rows of either label: those chosen by their label say nothing about a
        probability.
        """
        return len(np.unique(self.labels)) == 2


@dataclass(frozen=True)
class Metric:
    """One figure of a set of answers; `measure` gives None where it is not defined on them.

    It stands in the quality table with three digits, or in percent among those at the threshold.
    `in_strata`: measured on each stratum too.
    """

    label: str
    measure: Callable[[Scored], float | None]
    table: Literal["quality", "threshold"] = "quality"
    in_strata: bool = False


def _ece(scored: Scored) -> float | None:
    if not scored.has_both_labels:
        return None
    return expected_calibration_error(scored.p_labels.tolist(), scored.p_violation.tolist())


def _ece_expected(scored: Scored) -> float | None:
    if not scored.has_both_labels:
        return None
    return metrics.ece_expected(scored.p_violation)


# What is measured of every method's answers; an entry is a column of the report and a key of its
# JSON.
METRICS: dict[str, Metric] = {
    "f1": Metric("F1", lambda scored: metrics.f1(scored.labels, scored.decisions)),
    "auroc": Metric(
        "AUROC", lambda scored: metrics.auroc(scored.ranked_labels, scored.logits), in_strata=True
    ),
    "auprc": Metric("AUPRC", lambda scored: metrics.auprc(scored.ranked_labels, scored.logits)),
    "recall_at_fpr1": Metric(
        "recall at 1 % FPR",
        lambda scored: metrics.recall_at_fpr(scored.ranked_labels, scored.logits),
    ),
    "ece": Metric("ECE", _ece, in_strata=True),
    "ece_expected": Metric("expected ECE", _ece_expected, in_strata=True),
    "false_positive_rate": Metric(
        "false-positive rate",
        lambda scored: _share(scored.decisions[scored.labels == 0]),
        "threshold",
        in_strata=True,
    ),
    "recall": Metric(
        "recall",
        lambda scored: _share(scored.decisions[scored.labels == 1]),
        "threshold",
        in_strata=True,
    ),
    "confident": Metric("confident", lambda scored: _share(scored.is_confident), "threshold"),
    "accuracy_where_confident": Metric(
        "accuracy where confident",
        lambda scored: _share(scored.is_right_where_confident),
        "threshold",
    ),
}


class Stratum(Strict):
    """Accuracy and the metrics `in_strata` on the examples of one stratum, means over seeds.

    Hard negatives: 1 - accuracy is the false-positive rate.
    """

    n: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    metrics: dict[str, float | None]


class Quality(Strict):
    """How good one set of answers is. Metrics that need a logit or a probability are None for a
    bare yes or no.

    `answered` of `n` examples got a usable answer; the others count as wrong in whatever needs a
    decision and are left out of the rest.
    """

    n: int
    answered: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    metrics: dict[str, float | None]  # by the names of METRICS


class MethodQuality(Quality):
    """Means over seeds, and each seed by itself. `answered` is that of the worst seed;
    `metrics.accuracy_interval` says what the intervals can show. A single seed's is Wilson's.
    """

    accuracy_sd: float | None
    false_positive_rate_ci95: tuple[float, float] | None
    recall_ci95: tuple[float, float] | None
    strata: dict[str, Stratum]
    seeds: dict[str, Quality]


def quality(labels: Sequence[int], answers: Sequence[Answer]) -> Quality:
    """One set of answers against the labels."""
    scored = _scored(labels, answers)
    accuracy = float((scored.decisions == scored.labels).mean())
    return Quality(
        n=len(answers),
        answered=len(answers) - unanswered([answers]),
        accuracy=accuracy,
        accuracy_ci95=metrics.wilson_interval(accuracy, len(answers)),
        metrics={name: metric.measure(scored) for name, metric in METRICS.items()},
    )


def method_quality(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]], *, name_seeds: bool = True
) -> MethodQuality:
    """A method's answers by seed, each in the order of the examples.

    Without `name_seeds` it has no seeds of its own.
    """
    labels = [example.label for example in examples]
    qualities = {str(seed): quality(labels, answers) for seed, answers in by_seed.items()}
    accuracies = [seed_quality.accuracy for seed_quality in qualities.values()]
    return MethodQuality(
        n=len(examples),
        answered=min(seed_quality.answered for seed_quality in qualities.values()),
        accuracy=fmean(accuracies),
        accuracy_ci95=metrics.accuracy_interval(outcomes(examples, by_seed)),
        accuracy_sd=metrics.standard_deviation(accuracies),
        metrics=mean_metrics([seed_quality.metrics for seed_quality in qualities.values()]),
        false_positive_rate_ci95=_flagged_interval(examples, by_seed, 0),
        recall_ci95=_flagged_interval(examples, by_seed, 1),
        strata=_strata(examples, by_seed),
        seeds=qualities if name_seeds else {},
    )


def mean_over(values: Sequence[float | None]) -> float | None:
    """The mean, None where a value is missing: a mean over some would compare unlike things."""
    present = [value for value in values if value is not None]
    if not present or len(present) < len(values):
        return None
    return fmean(present)


def mean_metrics(measured: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean of every metric over seeds or rules."""
    means = {}
    for name in measured[0]:
        means[name] = mean_over([values[name] for values in measured])
    return means


def outcomes(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]]
) -> metrics.Outcomes:
    """Right or wrong by seed and example. No answer counts as wrong."""
    values = np.array([is_right(examples, answers) for answers in by_seed.values()], dtype=np.int8)
    return metrics.Outcomes(values, group_numbers(examples))


def is_right(examples: Sequence[Example], answers: Sequence[Answer]) -> np.ndarray:
    """Whether each answer is the example's label, bool [examples]. No answer counts as wrong."""
    rows = zip(answers, examples, strict=True)
    return np.array([answer.violates == bool(example.label) for answer, example in rows])


def group_numbers(examples: Sequence[Example]) -> np.ndarray:
    """The examples' groups, numbered from 0 in the order in which they come."""
    groups = dict.fromkeys(example.group for example in examples)
    number_of_group = {group: number for number, group in enumerate(groups)}
    return np.array([number_of_group[example.group] for example in examples], dtype=np.int64)


def unanswered(by_seed: Iterable[Sequence[Answer]]) -> int:
    """How many answers are none, over all seeds."""
    return sum(answer.violates is None for answer in itertools.chain.from_iterable(by_seed))


def _scored(labels: Sequence[int], answers: Sequence[Answer]) -> Scored:
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
    """0 or 1; where there is no usable answer, the wrong one."""
    if violates is None:
        return 1 - label
    return int(violates)


def _share(hits: np.ndarray) -> float | None:
    """The share that is true; None of nothing."""
    if not len(hits):
        return None
    return float(hits.mean())


def _flagged_interval(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]], label: int
) -> tuple[float, float] | None:
    """95 % interval of the share that is flagged of the examples with this label; None where there
    is none.
    """
    right = outcomes(examples, by_seed)
    chosen = np.array([example.label == label for example in examples])
    if not chosen.any():
        return None
    part = metrics.Outcomes(right.values[:, chosen], right.groups[chosen])
    low, high = metrics.accuracy_interval(part)
    if label == 0:
        return 1 - high, 1 - low
    return low, high


def _strata(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]]
) -> dict[str, Stratum]:
    """Quality on the examples of each stratum that any of them belongs to."""
    members: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        for name in _strata_of(example):
            members.setdefault(name, []).append(index)
    return {name: _stratum(examples, by_seed, members[name]) for name in sorted(members, key=_rank)}


def _stratum(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]], chosen: Sequence[int]
) -> Stratum:
    part = [examples[index] for index in chosen]
    labels = [example.label for example in part]
    answers_by_seed: dict[int, list[Answer]] = {}
    for seed, answers in by_seed.items():
        answers_by_seed[seed] = [answers[index] for index in chosen]
    right = outcomes(part, answers_by_seed)
    measured = [_measured_in_strata(_scored(labels, a)) for a in answers_by_seed.values()]
    return Stratum(
        n=len(chosen),
        accuracy=float(right.values.mean()),
        accuracy_ci95=metrics.accuracy_interval(right),
        metrics=mean_metrics(measured),
    )


def _measured_in_strata(scored: Scored) -> dict[str, float | None]:
    return {name: metric.measure(scored) for name, metric in METRICS.items() if metric.in_strata}


def _strata_of(example: Example) -> list[str]:
    """`meta.stratum` (were the phrasings in training?), `meta.difficulty`, and whether an allowed
    row looks like a violation.
    """
    names = [str(example.meta[kind]) for kind in ("stratum", "difficulty") if kind in example.meta]
    if example.label == 0 and example.meta.get("stance") in LOOKS_LIKE:
        names.append(HARD_NEGATIVES)
    return names


def _rank(stratum: str) -> tuple[int, str]:
    """Strata in a report's order: those with names of their own, then from easy to hard."""
    order = (*get_args(Difficulty), HARD_NEGATIVES)
    if stratum in order:
        return order.index(stratum) + 1, ""
    return 0, stratum
