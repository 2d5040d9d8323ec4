"""How good one method's answers on a rule's test examples are.

Knows nothing of who answered, or of other methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from data.generator.dimensions import Difficulty
from eval import metrics
from eval.answer import Answer
from eval.ranking import RankedRows, auroc_difference, auroc_estimate
from eval.scored import Scored, group_numbers, outcomes, scored_answers, unanswered
from guard.conversation.example import Example
from guard.files.yaml_file import Strict
from guard.verdict import expected_calibration_error

HARD_NEGATIVES = "hard negatives"
# `meta.stance` of allowed rows that come close to a violation
LOOKS_LIKE = ("quotes", "supposes", "resembles", "asks", "does")


@dataclass(frozen=True)
class Metric:
    """One figure of a set of answers; `measure` gives None where it is not defined on them.

    `table`: the quality table, which shows it with three digits, or the table of figures at the
    threshold, which shows it in percent. `in_strata`: whether it is measured on each stratum too.
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


# What is measured of every method's answers. An entry is a column of the report and a key of its
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

    `answered` of `n` examples got a usable answer. The others count as wrong in every metric of
    decisions, and are left out of the other metrics.
    """

    n: int
    answered: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    metrics: dict[str, float | None]  # by the names of METRICS


class RankingGain(Strict):
    """By how much an AUROC is above another one on the same rows, and the paired 95 % interval."""

    mean: float
    ci95: tuple[float, float]


class MethodQuality(Quality):
    """Means over seeds, and each seed by itself.

    `answered` is that of the worst seed. `metrics.accuracy_interval` says what the intervals can
    show; the interval of a single seed is Wilson's. An AUROC's interval is the bootstrap's over
    seeds and groups (`ranking.py`), on the rows that have a logit in every seed.
    """

    accuracy_sd: float | None
    auroc_ci95: tuple[float, float] | None
    auroc_minus_bag_of_words: RankingGain | None  # None for baselines
    false_positive_rate_ci95: tuple[float, float] | None
    recall_ci95: tuple[float, float] | None
    strata: dict[str, Stratum]
    seeds: dict[str, Quality]


def quality(labels: Sequence[int], answers: Sequence[Answer]) -> Quality:
    """The quality of one set of answers."""
    scored = scored_answers(labels, answers)
    accuracy = float((scored.decisions == scored.labels).mean())
    return Quality(
        n=len(answers),
        answered=len(answers) - unanswered([answers]),
        accuracy=accuracy,
        accuracy_ci95=metrics.wilson_interval(accuracy, len(answers)),
        metrics={name: metric.measure(scored) for name, metric in METRICS.items()},
    )


def method_quality(
    examples: Sequence[Example],
    by_seed: Mapping[int, Sequence[Answer]],
    *,
    name_seeds: bool = True,
    bag_of_words: Sequence[Answer] | None = None,
) -> MethodQuality:
    """The quality of a method's answers, which come by seed in the order of the examples.

    Without `name_seeds` the figures of single seeds are left out. `bag_of_words` are the answers
    that its AUROC is compared with.
    """
    ranked = _ranked(examples, [*by_seed.values()])
    labels = [example.label for example in examples]
    qualities = {str(seed): quality(labels, answers) for seed, answers in by_seed.items()}
    accuracies = [seed_quality.accuracy for seed_quality in qualities.values()]
    return MethodQuality(
        n=len(examples),
        answered=min(seed_quality.answered for seed_quality in qualities.values()),
        accuracy=fmean(accuracies),
        accuracy_ci95=metrics.accuracy_interval(outcomes(examples, by_seed)),
        accuracy_sd=metrics.standard_deviation(accuracies),
        auroc_ci95=None if ranked is None else auroc_estimate(*ranked).ci95,
        auroc_minus_bag_of_words=_gain(examples, by_seed, bag_of_words),
        metrics=mean_metrics([seed_quality.metrics for seed_quality in qualities.values()]),
        false_positive_rate_ci95=_flagged_interval(examples, by_seed, 0),
        recall_ci95=_flagged_interval(examples, by_seed, 1),
        strata=_strata(examples, by_seed),
        seeds=qualities if name_seeds else {},
    )


def mean_over(values: Sequence[float | None]) -> float | None:
    """The mean; None where a value is missing, because means over different sets do not compare."""
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


def _share(hits: np.ndarray) -> float | None:
    """The share of true values; None where there are no values."""
    if not len(hits):
        return None
    return float(hits.mean())


def _ranked(
    examples: Sequence[Example], answers: Sequence[Sequence[Answer]]
) -> tuple[RankedRows, np.ndarray] | None:
    """The rows to which each of several sequences of answers states a logit, and those logits,
    [sequences, rows]; None where they are not of both labels.
    """
    logits = np.full((len(answers), len(examples)), np.nan)
    for row, row_answers in zip(logits, answers, strict=True):
        row[:] = [np.nan if answer.logit is None else answer.logit for answer in row_answers]
    is_ranked = ~np.isnan(logits).any(axis=0)
    labels = np.array([example.label for example in examples])[is_ranked]
    if len(np.unique(labels)) < 2:
        return None
    return RankedRows(labels, group_numbers(examples)[is_ranked]), logits[:, is_ranked]


def _gain(
    examples: Sequence[Example],
    by_seed: Mapping[int, Sequence[Answer]],
    bag_of_words: Sequence[Answer] | None,
) -> RankingGain | None:
    """How far the AUROC is above the bag of words', which is the same for every seed."""
    if bag_of_words is None:
        return None
    ranked = _ranked(examples, [*by_seed.values(), bag_of_words])
    if ranked is None:
        return None
    rows, logits = ranked
    of_bag = np.repeat(logits[-1:], len(by_seed), axis=0)
    difference = auroc_difference(rows, logits[:-1], of_bag)
    return RankingGain(mean=difference.mean, ci95=difference.ci95)


def _flagged_interval(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]], label: int
) -> tuple[float, float] | None:
    """95 % interval of the share of examples with this label that are flagged; None where no
    example has it.
    """
    right = outcomes(examples, by_seed)
    has_label = np.array([example.label == label for example in examples])
    if not has_label.any():
        return None
    labelled = metrics.Outcomes(right.values[:, has_label], right.groups[has_label])
    low, high = metrics.accuracy_interval(labelled)
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
    measured: list[dict[str, float | None]] = []
    for answers in answers_by_seed.values():
        measured.append(_measured_in_strata(scored_answers(labels, answers)))
    return Stratum(
        n=len(chosen),
        accuracy=float(right.values.mean()),
        accuracy_ci95=metrics.accuracy_interval(right),
        metrics=mean_metrics(measured),
    )


def _measured_in_strata(scored: Scored) -> dict[str, float | None]:
    return {name: metric.measure(scored) for name, metric in METRICS.items() if metric.in_strata}


def _strata_of(example: Example) -> list[str]:
    """The example's strata: `meta.stratum` (were the phrasings in training?), `meta.difficulty`,
    and hard negatives, if it is an allowed row that looks like a violation.
    """
    names = [str(example.meta[kind]) for kind in ("stratum", "difficulty") if kind in example.meta]
    if example.label == 0 and example.meta.get("stance") in LOOKS_LIKE:
        names.append(HARD_NEGATIVES)
    return names


def _rank(stratum: str) -> tuple[int, str]:
    """The sort key for a report's order: other strata by name, then from easy to hard."""
    order = (*get_args(Difficulty), HARD_NEGATIVES)
    if stratum in order:
        return order.index(stratum) + 1, ""
    return 0, stratum
