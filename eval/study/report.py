"""A study's figures as JSON and Markdown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from eval.answers import label_of
from eval.report.tables import markdown_table
from guard.files.atomic import save_figures
from guard.files.yaml_file import Strict
from guard.study import Origin, Study


class StudyFigure(Strict):
    """The AUROC of one method with so many rows, on the test rows of one origin, or that of another
    method `minus` it on the same rows and seeds: a mean over seeds with its 95 % interval.
    """

    rows: int
    origin: Origin
    method: str
    minus: str | None = None
    mean: float
    ci95: tuple[float, float]
    by_seed: tuple[float, ...]

    def __str__(self) -> str:
        """A difference is bold where chance does not explain it."""
        low, high = self.ci95
        if self.minus is None:
            return f"{self.mean:.3f} [{low:.3f}, {high:.3f}]"
        text = f"{self.mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        if low <= 0 <= high:
            return text
        return f"**{text}**"


class StudyReport(Strict):
    """All figures of a study on one model."""

    study: Study
    model: str
    tested: dict[Origin, int]  # test rows
    violating: dict[Origin, int]  # of them
    figures: tuple[StudyFigure, ...]
    commit: str
    hardware: str
    versions: dict[str, str]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(it.method for it in self.figures if it.minus is None))

    def figure(
        self, rows: int, method: str, origin: Origin = "real", minus: str | None = None
    ) -> StudyFigure:
        """The figure at one place of the tables. Raises KeyError for one that is not measured."""
        by_place = {(it.rows, it.method, it.origin, it.minus): it for it in self.figures}
        return by_place[rows, method, origin, minus]

    def as_markdown(self) -> str:
        sizes = self.study.sizes
        columns: list[tuple[int, Origin]] = [(size, "real") for size in sizes]
        label = "rows, about a fifth of them validation"
        if self.study.kind == "transfer":  # the flattering figure beside the honest one
            columns.insert(0, (sizes[0], "generated"))
            label = "real rows mixed in, about a fifth of them validation"
        lines = [self._heading(), "", self._table(label, columns), ""]
        return "\n".join([*lines, "Bold: the interval of the paired difference excludes 0."])

    def _heading(self) -> str:
        seeds = len(self.study.of_size(self.study.sizes[0]))
        rows = ", ".join(
            f"{count:,} {origin} ({self.violating[origin]:,} violate)"
            for origin, count in self.tested.items()
        )
        source = self.study.data or "the rule's own rows"
        return (
            f"{self.study.rule} on {self.model}, {source}. AUROC with 95 % intervals, bootstrap "
            f"over rows' groups and {seeds} seeds. Test rows: {rows}."
        )

    def _table(self, label: str, columns: Sequence[tuple[int, Origin]]) -> str:
        """Methods, and the differences of every two of them, against numbers of rows."""
        head = [label]
        for size, origin in columns:
            head.append(f"{size:,}" if origin == "real" else f"{size:,}, on generated rows")
        rows = []
        pairs: list[tuple[str, str | None]] = [(method, None) for method in self.methods]
        pairs += [(later, earlier) for earlier, later in itertools.combinations(self.methods, 2)]
        for method, minus in pairs:
            name = label_of(method)
            if minus is not None:
                name += f" minus {label_of(minus)}"
            figures = [self.figure(size, method, origin, minus) for size, origin in columns]
            rows.append([name, *map(str, figures)])
        return markdown_table(head, rows)

    def save(self, path: Path) -> None:
        """Write `path`, and the Markdown beside it, each whole or not at all."""
        save_figures(path, json.dumps(self.model_dump(mode="json"), indent=1), self.as_markdown())
