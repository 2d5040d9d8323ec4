"""Markdown tables of measured figures, cell by cell.

Knows nothing of evaluations, notes or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.quality import METRICS


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned too."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_line(head, widths), _line(["-" * width for width in widths], widths)]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |"


def metric_labels(table: str) -> list[str]:
    """The labels of the metrics that stand in a table."""
    return [metric.label for metric in METRICS.values() if metric.table == table]


def metric_cells(
    metrics: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float] | None] | None = None,
) -> list[str]:
    """The quality table's metrics with three digits, with their intervals where there are such;
    empty where they were not measured.
    """
    cells: list[str] = []
    for name, metric in METRICS.items():
        if metric.table == "quality":
            cell = three_digits(metrics[name]) if name in metrics else ""
            cells.append(f"{cell} {three_digit_interval((intervals or {}).get(name))}".rstrip())
    return cells


def accuracy_cell(
    accuracy: float, ci95: tuple[float, float] | None, sd: float | None = None
) -> str:
    """Accuracy in percent, its spread over seeds and its interval, where there is one."""
    spread = "" if sd is None else f" ± {100 * sd:.1f}"
    return f"{100 * accuracy:.1f}{spread} {interval_cell(ci95)}".rstrip()


def interval_cell(ci95: tuple[float, float] | None) -> str:
    """An interval in percent; empty without one."""
    if ci95 is None:
        return ""
    return f"[{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]"


def three_digit_interval(ci95: tuple[float, float] | None) -> str:
    """An interval with three digits; empty without one."""
    if ci95 is None:
        return ""
    return f"[{ci95[0]:.3f}, {ci95[1]:.3f}]"


def percent_cell(value: float | None, ci95: tuple[float, float] | None = None) -> str:
    """A share in percent, with its interval where there is one; empty where it is not defined."""
    if value is None:
        return ""
    return f"{100 * value:.1f} {interval_cell(ci95)}".rstrip()


def share_cell(count: int, total: int) -> str:
    """A count in percent of a total; a dash where that is 0."""
    if total == 0:
        return "-"
    return f"{100 * count / total:.1f}"


def three_digits(value: float | None) -> str:
    """A metric, or a dash where it is not defined."""
    return "-" if value is None else f"{value:.3f}"
