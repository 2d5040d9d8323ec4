"""How good one method's answers on a rule's test examples are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import numpy as np
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from data.generator.dimensions import Difficulty
from eval import metrics
from eval.answers import Answer, Scored, group_numbers, outcomes, scored_answers
from eval.metrics import Difference, RankedRows, auroc_difference, auroc_estimate
from guard.conversation.example import Example
from guard.files.yaml_file import Strict
from guard.twins import FEWEST_TWINS, TwinRate
from guard.verdict import expected_calibration_error

Measure = Callable[[Scored], float | None]  # None where it is not defined


@dataclass(frozen=True)
class Metric:
    """One figure of a set of answers. `table`: the quality table, which shows it with three digits,
    or the table of figures at the threshold, which shows it in percent. `in_strata`: whether it is
    measured on each stratum too.
    """

    label: str
    measure: Measure
    table: Literal["quality", "threshold"] = "quality"
    in_strata: bool = False


def _ranked(measure: Callable[[np.ndarray, np.ndarray], float]) -> Measure:
    """The measure of labels and logits of the examples with a logit; None without both labels."""

    def measure_ranked(scored: Scored) -> float | None:
        ranked = scored.part(~np.isnan(scored.logits))
        if not metrics.has_both(ranked.labels):
            return None
        return float(measure(ranked.labels, ranked.logits))

    return measure_ranked


def _ece(scored: Scored) -> float | None:
    """None without both labels: rows chosen by their label say nothing about a probability."""
    if not metrics.has_both(scored.labels):
        return None
    stated = scored.part(~np.isnan(scored.p_violation))
    return expected_calibration_error(stated.labels.tolist(), stated.p_violation.tolist())


def _share(values: np.ndarray) -> float | None:
    """Of true values among those that are stated; None where there are none."""
    stated = values[~np.isnan(values.astype(float))]
    if not len(stated):
        return None
    return float(stated.mean())


def _flagged(label: int) -> Measure:
    return lambda scored: _share(scored.decisions[scored.labels == label])


# What is measured of every method's answers. An entry is a column of the report and a key of its
# JSON.
METRICS: dict[str, Metric] = {
    "f1": Metric("F1", lambda it: float(f1_score(it.labels, it.decisions, zero_division=0))),
    "auroc": Metric("AUROC", _ranked(roc_auc_score), in_strata=True),
    "auprc": Metric("AUPRC", _ranked(average_precision_score)),
    "recall_at_fpr1": Metric("recall at 1 % FPR", _ranked(metrics.recall_at_fpr)),
    "ece": Metric("ECE", _ece, in_strata=True),
    "false_positive_rate": Metric("false-positive rate", _flagged(0), "threshold", in_strata=True),
    "recall": Metric("recall", _flagged(1), "threshold", in_strata=True),
    "confident": Metric("confident", lambda scored: _share(scored.confident), "threshold"),
    "accuracy_where_confident": Metric(
        "accuracy where confident",
        lambda scored: _share(scored.is_right[scored.confident == 1]),
        "threshold",
    ),
}


class Stratum(Strict):
    """Means over seeds."""

    n: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    metrics: dict[str, float | None]


class Quality(Strict):
    """How good one set of answers is. Metrics that need a logit or a probability are None for a
    bare yes or no. `answered` of `n` examples got a usable answer. The others count as wrong in
    every metric of decisions, and are left out of the other metrics.
    """

    n: int
    answered: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    metrics: dict[str, float | None]  # by the names of METRICS


class MethodQuality(Quality):
    """Means over seeds, and each seed by itself. `answered` is that of the worst seed.
    `metrics.accuracy_interval` says what the intervals can show; the interval of a single seed is
    Wilson's. An AUROC's interval is the bootstrap's over seeds and groups (`auroc_estimate`), on
    the rows that have a logit in every seed.
    """

    accuracy_sd: float | None
    auroc_ci95: tuple[float, float] | None
    auroc_minus_bag_of_words: Difference | None  # None for baselines
    false_positive_rate_ci95: tuple[float, float] | None
    recall_ci95: tuple[float, float] | None
    twins: TwinRate
    strata: dict[str, Stratum]
    seeds: dict[str, Quality]


def quality(scored: Scored) -> Quality:
    accuracy = float(scored.is_right.mean())
    return Quality(
        n=len(scored.labels),
        answered=int(scored.is_answered.sum()),
        accuracy=accuracy,
        accuracy_ci95=metrics.wilson_interval(accuracy, len(scored.labels)),
        metrics={name: metric.measure(scored) for name, metric in METRICS.items()},
    )


def method_quality(
    examples: Sequence[Example],
    by_seed: Mapping[int, Sequence[Answer]],
    bag_of_words: Sequence[Answer] | None = None,
) -> MethodQuality:
    """The quality of a method's answers, which come by seed in the order of the examples.
    `bag_of_words` are the answers that its AUROC is compared with; None for a baseline, which has
    no figures of single seeds.
    """
    labels, groups = [example.label for example in examples], group_numbers(examples)
    scored = [scored_answers(labels, answers, groups) for answers in by_seed.values()]
    qualities = [quality(of_seed) for of_seed in scored]
    gain: Difference | None = None
    seeds: dict[str, Quality] = {}
    if bag_of_words is not None:
        gain = _gain(scored, scored_answers(labels, bag_of_words, groups))
        seeds = dict(zip(map(str, by_seed), qualities, strict=True))
    return MethodQuality(
        n=len(examples),
        answered=min(of_seed.answered for of_seed in qualities),
        accuracy=fmean(of_seed.accuracy for of_seed in qualities),
        accuracy_ci95=metrics.accuracy_interval(outcomes(scored)),
        accuracy_sd=metrics.standard_deviation([of_seed.accuracy for of_seed in qualities]),
        auroc_ci95=_auroc_interval(scored),
        auroc_minus_bag_of_words=gain,
        metrics=mean_metrics([of_seed.metrics for of_seed in qualities]),
        false_positive_rate_ci95=_flagged_interval(scored, 0),
        recall_ci95=_flagged_interval(scored, 1),
        twins=_twin_rate(examples, scored),
        strata=_strata(examples, scored),
        seeds=seeds,
    )


def mean_metrics(measured: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Means over seeds or rules; None where a value is missing: they would not compare."""
    means: dict[str, float | None] = {}
    for name in measured[0]:
        values = [of_one[name] for of_one in measured]
        present = [value for value in values if value is not None]
        means[name] = fmean(present) if len(present) == len(values) else None
    return means


def _ranking(scored: Sequence[Scored]) -> tuple[RankedRows, np.ndarray] | None:
    """The rows with a logit in all sets, and those logits, [sets, rows]; None of one label."""
    logits = np.array([answers.logits for answers in scored])
    is_ranked = ~np.isnan(logits).any(axis=0)
    labels, groups = scored[0].labels[is_ranked], scored[0].groups[is_ranked]
    if not metrics.has_both(labels):
        return None
    return RankedRows(labels, groups), logits[:, is_ranked]


def _auroc_interval(scored: Sequence[Scored]) -> tuple[float, float] | None:
    ranking = _ranking(scored)
    if ranking is None:
        return None
    return auroc_estimate(*ranking).ci95


def _gain(scored: Sequence[Scored], bag_of_words: Scored) -> Difference | None:
    """How far the AUROC is above the bag of words', which is the same for every seed."""
    ranking = _ranking([*scored, bag_of_words])
    if ranking is None:
        return None
    rows, logits = ranking
    of_bag = np.repeat(logits[-1:], len(scored), axis=0)
    difference = auroc_difference(rows, logits[:-1], of_bag)
    return Difference(mean=difference.mean, ci95=difference.ci95)


def _flagged_interval(scored: Sequence[Scored], label: int) -> tuple[float, float] | None:
    """95 % interval of the share that is flagged of the rows of this label, if any has it."""
    has_label = scored[0].labels == label
    if not has_label.any():
        return None
    right = outcomes([of_seed.part(has_label) for of_seed in scored])
    low, high = metrics.accuracy_interval(right)
    if label == 0:
        return 1 - high, 1 - low
    return low, high


def _twin_rate(examples: Sequence[Example], scored: Sequence[Scored]) -> TwinRate:
    """The mean over seeds of the share of twins that is flagged; none of too few."""
    is_twin = np.array([example.is_twin for example in examples])
    rate = TwinRate(n=int(is_twin.sum()))
    if rate.n < FEWEST_TWINS:
        return rate
    twins = [of_seed.part(is_twin) for of_seed in scored]
    flagged = fmean(float(of_seed.decisions.mean()) for of_seed in twins)
    return TwinRate(n=rate.n, fpr=flagged, fpr_ci95=_flagged_interval(twins, 0))


def _strata(examples: Sequence[Example], scored: Sequence[Scored]) -> dict[str, Stratum]:
    members: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        for kind in ("stratum", "difficulty"):
            if kind in example.meta:
                members.setdefault(str(example.meta[kind]), []).append(index)
    strata: dict[str, Stratum] = {}
    in_strata = {name: metric for name, metric in METRICS.items() if metric.in_strata}
    for name in sorted(members, key=_rank):
        parts = [of_seed.part(members[name]) for of_seed in scored]
        right = outcomes(parts)
        measured: list[dict[str, float | None]] = []
        for part in parts:
            measured.append({key: metric.measure(part) for key, metric in in_strata.items()})
        strata[name] = Stratum(
            n=len(members[name]),
            accuracy=float(right.values.mean()),
            accuracy_ci95=metrics.accuracy_interval(right),
            metrics=mean_metrics(measured),
        )
    return strata


def _rank(stratum: str) -> tuple[int, str]:
    order = get_args(Difficulty)
    if stratum in order:
        return order.index(stratum) + 1, ""
    return 0, stratum
