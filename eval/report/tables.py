"""The report's tables: heads and rows of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eval.answers import BAG_OF_WORDS, label_of
from eval.metrics import Difference
from eval.quality import METRICS, MethodQuality
from guard.conversation.example import REAL

if TYPE_CHECKING:
    from eval.report.report import Report

TableRows = list[list[str]]
Interval = tuple[float, float]
NO_INTERVALS: Mapping[str, Interval | None] = {}


def quality_table(report: Report) -> str:
    """Every contender's figures on every rule, and the means where there are several rules."""
    head = ["rule", "method", "accuracy", *metric_labels("quality"), "AUROC - bag of words"]
    rows: TableRows = []
    for evaluation in report.evaluations:
        rule = f"{evaluation.rule} ({evaluation.n_violating} of {evaluation.n_test})"
        for contender in report.contenders:
            quality = evaluation.methods[contender]
            accuracy = accuracy_cell(quality.accuracy, quality.accuracy_ci95, quality.accuracy_sd)
            cells = _cells("quality", quality.metrics, {"auroc": quality.auroc_ci95})
            above_words = _gain_cell(quality.auroc_minus_bag_of_words)
            rows.append([rule, label_of(contender), accuracy, *cells, above_words])
            rule = ""
    if len(report.evaluations) > 1:
        rule = "**mean**"
        for contender in report.contenders:
            mean = report.mean(contender)
            accuracy = accuracy_cell(mean.accuracy, None, mean.accuracy_sd)
            rows.append([rule, label_of(contender), accuracy, *_cells("quality", mean.metrics), ""])
            rule = ""
    return markdown_table(head, rows)


def _cells(
    table: str,
    measured: Mapping[str, float | None],
    intervals: Mapping[str, Interval | None] = NO_INTERVALS,
) -> list[str]:
    """The figures of a table: of the quality with three digits, at the threshold in percent."""
    cell = {"quality": three_digits, "threshold": percent_cell}[table]
    names = [name for name, metric in METRICS.items() if metric.table == table]
    return [cell(measured.get(name), intervals.get(name)) for name in names]


def _gain_cell(gain: Difference | None) -> str:
    """A difference of AUROCs with its interval; bold where that excludes 0."""
    if gain is None:
        return ""
    low, high = gain.ci95
    difference = f"{gain.mean:+.3f}"
    if low > 0 or high < 0:
        difference = f"**{difference}**"
    return f"{difference} [{low:+.3f}, {high:+.3f}]"


def threshold_table(report: Report) -> str:
    """What is flagged at each method's own threshold, of own rows also by themselves."""
    head = ["rule", "method", "largest FPR stated", *metric_labels("threshold"), "FPR on twins"]
    rows: TableRows = []
    for evaluation in report.evaluations:
        stated = "" if evaluation.max_fpr is None else f"{100 * evaluation.max_fpr:g}"
        for contender in (BAG_OF_WORDS, *report.trained):
            quality = evaluation.methods[contender]
            intervals = {
                "false_positive_rate": quality.false_positive_rate_ci95,
                "recall": quality.recall_ci95,
            }
            cells = _cells("threshold", quality.metrics, intervals)
            rows.append([evaluation.rule, label_of(contender), stated, *cells, _twins(quality)])
            own_rows = quality.strata.get(REAL)
            if own_rows is not None and own_rows.n < quality.n:
                cells = _cells("threshold", own_rows.metrics)
                label = f"{label_of(contender)}, {own_rows.n} own rows"
                rows.append([evaluation.rule, label, stated, *cells, ""])
    return markdown_table(head, rows)


def _twins(quality: MethodQuality) -> str:
    """The share of twins that is flagged, and how many they are."""
    rate = quality.twins
    if rate.fpr is None:
        return str(rate)
    return f"{percent_cell(rate.fpr, rate.fpr_ci95)} of {rate.n}"


def strata_table(report: Report) -> str:
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


def composition_table(report: Report) -> str:
    """A composed rule's adapter beside its parents' on its test rows, by PEFT, and beside what
    other rules trained on these rows, by the engine; empty without a composed rule.
    """
    head = ["rule", "method", "adapter", "accuracy", "AUROC", "no parent's verdict", "wrong"]
    rows: TableRows = []
    for evaluation in report.evaluations:
        for method, of_all in evaluation.composition.items():
            share = percent_cell(of_all["interference"], of_all["interference_ci95"])
            last = [share, str(of_all["interference_wrong"])]
            named = [f"{evaluation.rule} ({of_all['n']} rows)", label_of(method)]
            for name, it in of_all["adapters"].items():
                accuracy = accuracy_cell(it["accuracy"], it["accuracy_ci95"])
                rows.append([*named, name, accuracy, three_digits(it["auroc"], it["auroc_ci95"])])
                rows[-1] += last
                named, last = ["", ""], ["", ""]
            for other in report.evaluations:
                same_rows = other.test_rows == evaluation.test_rows
                if same_rows and method not in other.composition:
                    own = other.methods[method]
                    accuracy = accuracy_cell(own.accuracy, own.accuracy_ci95)
                    auroc = three_digits(own.metrics["auroc"], own.auroc_ci95)
                    rows.append(["", "", f"{other.rule}, trained", accuracy, auroc, "", ""])
    return markdown_table(head, rows) if rows else ""


def agreement_table(report: Report) -> str:
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


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_line(head, widths), _line(["-" * width for width in widths], widths)]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |"


def metric_labels(table: str) -> list[str]:
    return [metric.label for metric in METRICS.values() if metric.table == table]


def accuracy_cell(
    accuracy: float, ci95: tuple[float, float] | None, sd: float | None = None
) -> str:
    spread = ""
    if sd is not None:
        spread = f" ± {100 * sd:.1f}"
    return f"{100 * accuracy:.1f}{spread} {interval_cell(ci95)}".rstrip()


def interval_cell(ci95: tuple[float, float] | None) -> str:
    if ci95 is None:
        return ""
    return f"[{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]"


def percent_cell(value: float | None, ci95: tuple[float, float] | None = None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} {interval_cell(ci95)}".rstrip()


def three_digits(value: float | None, ci95: tuple[float, float] | None = None) -> str:
    if value is None:
        return "-"
    if ci95 is None:
        return f"{value:.3f}"
    return f"{value:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]"
