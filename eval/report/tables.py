"""The report's tables: heads and rows of each. Knows nothing of notes, files or pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from data.generator.tricks import TRICKS
from eval.contender import BAG_OF_WORDS, label_of
from eval.evaluation import Evaluation, difference_name
from eval.markdown import (
    accuracy_cell,
    markdown_table,
    metric_cells,
    metric_labels,
    percent_cell,
    share_cell,
    three_digits,
)
from eval.quality import METRICS, RankingGain
from eval.robustness import TrickFlips
from guard.conversation.example import REAL
from guard.files.yaml_file import Strict

TableRows = list[list[str]]
ABOVE_WORDS = "AUROC - bag of words"


class MeanQuality(Strict):
    """A contender's figures, averaged over rules; `accuracy_sd` is that mean's over seeds."""

    accuracy: float
    accuracy_sd: float | None
    metrics: dict[str, float | None]


class Evaluated(Protocol):
    """What the tables need of a report."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """One a rule."""
        ...

    @property
    def contenders(self) -> list[str]:
        """Baselines and methods, in order."""
        ...

    @property
    def trained(self) -> list[str]:
        """The methods, in order."""
        ...

    def mean(self, contender: str) -> MeanQuality:
        """One contender over all rules."""
        ...


def quality_table(report: Evaluated) -> str:
    """Every contender's figures on every rule, and the means where there are several rules."""
    head = ["rule", "method", "accuracy", *metric_labels("quality"), ABOVE_WORDS, "McNemar p"]
    rows: TableRows = []
    for evaluation in report.evaluations:
        rule = f"{evaluation.rule} ({evaluation.n_violating} of {evaluation.n_test})"
        for contender in report.contenders:
            quality = evaluation.methods[contender]
            accuracy = accuracy_cell(quality.accuracy, quality.accuracy_ci95, quality.accuracy_sd)
            cells = metric_cells(quality.metrics, {"auroc": quality.auroc_ci95})
            above_words = _gain_cell(quality.auroc_minus_bag_of_words)
            p = _mcnemar(evaluation, contender)
            rows.append([rule, label_of(contender), accuracy, *cells, above_words, p])
            rule = ""
    if len(report.evaluations) > 1:
        rows += _mean_rows(report)
    return markdown_table(head, rows)


def _mean_rows(report: Evaluated) -> Iterator[list[str]]:
    name = "**mean**"
    for contender in report.contenders:
        mean = report.mean(contender)
        accuracy = accuracy_cell(mean.accuracy, None, mean.accuracy_sd)
        yield [name, label_of(contender), accuracy, *metric_cells(mean.metrics), "", ""]
        name = ""


def _gain_cell(gain: RankingGain | None) -> str:
    """A difference of AUROCs with its interval; bold where that excludes 0."""
    if gain is None:
        return ""
    low, high = gain.ci95
    difference = f"{gain.mean:+.3f}"
    if low > 0 or high < 0:
        difference = f"**{difference}**"
    return f"{difference} [{low:+.3f}, {high:+.3f}]"


def _mcnemar(evaluation: Evaluation, contender: str) -> str:
    """The p against the method in the row above; nothing for the first, or without shared seeds."""
    above = _method_above(evaluation.trained, contender)
    difference = evaluation.differences.get(difference_name(contender, above))
    if difference is None:
        return ""
    return f"{difference.mcnemar_p:.3g}"


def _method_above(trained: Sequence[str], contender: str) -> str:
    """The method before this one; empty for the first, and for what is not trained."""
    if contender not in trained[1:]:
        return ""
    return trained[list(trained).index(contender) - 1]


def threshold_table(report: Evaluated) -> str:
    """What is flagged at each method's own threshold; of rows of one's own beside generated ones
    also by themselves.
    """
    head = ["rule", "method", "largest FPR stated", *metric_labels("threshold")]
    rows: TableRows = []
    for evaluation in report.evaluations:
        stated = "" if evaluation.max_fpr is None else f"{100 * evaluation.max_fpr:g}"
        for contender in (BAG_OF_WORDS, *report.trained):
            quality = evaluation.methods[contender]
            intervals = {
                "false_positive_rate": quality.false_positive_rate_ci95,
                "recall": quality.recall_ci95,
            }
            cells = _threshold_cells(quality.metrics, intervals)
            rows.append([evaluation.rule, label_of(contender), stated, *cells])
            own_rows = quality.strata.get(REAL)
            if own_rows is not None and own_rows.n < quality.n:
                cells = _threshold_cells(own_rows.metrics, {})
                label = f"{label_of(contender)}, {own_rows.n} own rows"
                rows.append([evaluation.rule, label, stated, *cells])
    return markdown_table(head, rows)


def _threshold_cells(
    measured: Mapping[str, float | None], intervals: Mapping[str, tuple[float, float] | None]
) -> list[str]:
    names = [name for name, metric in METRICS.items() if metric.table == "threshold"]
    return [percent_cell(measured.get(name), intervals.get(name)) for name in names]


def strata_table(report: Evaluated) -> str:
    """Every contender in every stratum, by rule; empty where no example is in any."""
    metrics = {}
    for name, metric in METRICS.items():
        if metric.in_strata and metric.table == "quality":
            metrics[name] = metric.label
    head = ["rule", "stratum", "n", "method", "accuracy", *metrics.values()]
    rows: TableRows = []
    for evaluation in report.evaluations:
        for stratum, first in evaluation.methods[report.contenders[0]].strata.items():
            named = [evaluation.rule, stratum, str(first.n)]
            for contender in report.contenders:
                part = evaluation.methods[contender].strata[stratum]
                accuracy = accuracy_cell(part.accuracy, part.accuracy_ci95)
                cells = [three_digits(part.metrics[name]) for name in metrics]
                rows.append([*named, label_of(contender), accuracy, *cells])
                named = ["", "", ""]
    if not rows:
        return ""
    return markdown_table(head, rows)


def trick_table(report: Evaluated) -> str:
    """Verdict flips by trick, all rules together: a rule by itself has too few perturbations."""
    head = ["perturbation", "method", "n", "flips", "right before", "right after"]
    rows: TableRows = []
    for name in TRICKS:
        label = name.replace("_", " ")
        for method in report.trained:
            flips = []
            for evaluation in report.evaluations:
                flips.append(evaluation.robustness.tricks[method][name])
            rows.append([label, label_of(method), *_trick_cells(flips)])
            label = ""
    return markdown_table(head, rows)


def _trick_cells(flips: Sequence[TrickFlips]) -> list[str]:
    total = sum(flip.n for flip in flips)
    return [
        str(total),
        share_cell(sum(flip.flips for flip in flips), total),
        share_cell(sum(flip.right_before for flip in flips), total),
        share_cell(sum(flip.right_after for flip in flips), total),
    ]


def agreement_table(report: Evaluated) -> str:
    """The served engine against PEFT, by rule and method."""
    head = ["rule", "method", "prompts", "max difference", "mean difference"]
    head += ["label flips", "tolerance", "refused"]
    rows: TableRows = []
    for evaluation in report.evaluations:
        for method, agreement in evaluation.agreement.items():
            row = [evaluation.rule, label_of(method), str(agreement.prompts)]
            row += [f"{agreement.max_difference:.2g}", f"{agreement.mean_difference:.2g}"]
            row += [str(agreement.label_flips), f"{agreement.tolerance:g}"]
            rows.append([*row, str(evaluation.refusals[method])])
    return markdown_table(head, rows)
