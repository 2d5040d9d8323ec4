"""A study as a picture: AUROC against the number of rows, a line for each method.

Knows nothing of how it was measured.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from eval.contender import label_of
from eval.report.picture import marks
from eval.study.report import StudyReport
from guard.files.atomic import atomic_write

SPREAD = 0.08  # between two methods' marks at one number of rows, in ticks


def draw_study(report: StudyReport, path: Path) -> None:
    """Write a PNG, whole or not at all: the sizes side by side, a mark with its 95 % interval for
    each method.

    In a transfer a dotted line is the method's AUROC on generated test rows, with the fewest real
    rows.
    """
    figure = Figure(figsize=(7.5, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    sizes = report.study.sizes
    for rank, (method, (colour, marker)) in enumerate(marks(report.methods).items()):
        cells = [report.cell(size, method) for size in sizes]
        shift = SPREAD * (rank - (len(report.methods) - 1) / 2)
        axes.errorbar(
            [column + shift for column in range(len(sizes))],
            [cell.auroc for cell in cells],
            yerr=[
                [max(0.0, cell.auroc - cell.ci95[0]) for cell in cells],
                [max(0.0, cell.ci95[1] - cell.auroc) for cell in cells],
            ],
            color=colour,
            marker=marker,
            capsize=3,
            linewidth=1.4,
            label=label_of(method),
        )
        if report.study.kind == "transfer":
            flattering = report.cell(sizes[0], method, "generated").auroc
            axes.axhline(flattering, color=colour, linestyle=":", linewidth=1)
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set(xlabel=_x_label(report), ylabel="AUROC on real test rows, 95 % interval")
    axes.set_title(f"{report.study.rule} on {report.model}", fontsize=10)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=8)
    with atomic_write(path) as part:
        figure.savefig(part, format="png")


def _x_label(report: StudyReport) -> str:
    if report.study.kind == "transfer":
        fewest = report.study.sizes[0]
        return (
            f"real rows beside the generated ones (dotted: on generated test rows, with {fewest})"
        )
    return "labelled rows, about a fifth of them for validation"
