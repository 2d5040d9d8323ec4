"""A study's figures as JSON and Markdown. Knows nothing of how they were measured."""

from __future__ import annotations

import json
from pathlib import Path

from eval.contender import BAG_OF_WORDS, label_of
from eval.markdown import markdown_table
from guard.files.atomic import save_figures
from guard.files.yaml_file import Strict
from guard.study import Origin, Study

SUFFICIENT = 0.01  # below a method's AUROC with the most rows, its last rows bought little


class StudyCell(Strict):
    """The AUROC of one method with so many rows, on the test rows of one origin; a mean over seeds
    with its 95 % interval.
    """

    rows: int
    origin: Origin
    method: str
    auroc: float
    ci95: tuple[float, float]
    by_seed: tuple[float, ...]


class StudyDifference(Strict):
    """AUROC of one method minus another's, on the same rows and seeds; the bootstrap is paired."""

    rows: int
    origin: Origin
    minuend: str
    subtrahend: str
    difference: float
    ci95: tuple[float, float]

    @property
    def is_clear(self) -> bool:
        """Whether chance does not explain it."""
        return not self.ci95[0] <= 0 <= self.ci95[1]


class StudyReport(Strict):
    """All figures of a study on one model."""

    study: Study
    title: str
    model: str
    tested: dict[Origin, int]  # test rows
    violating: dict[Origin, int]  # of them
    cells: tuple[StudyCell, ...]
    differences: tuple[StudyDifference, ...]
    commit: str
    hardware: str
    versions: dict[str, str]

    @property
    def methods(self) -> list[str]:
        """In the order of the tables, the bag of words first."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    def cell(self, rows: int, method: str, origin: Origin = "real") -> StudyCell:
        """The figure at one place of the tables."""
        for cell in self.cells:
            if (cell.rows, cell.method, cell.origin) == (rows, method, origin):
                return cell
        raise KeyError((rows, method, origin))

    def as_markdown(self) -> str:
        """The tables and what they say."""
        lines = [self._heading(), ""]
        if self.study.kind == "transfer":
            lines += [*self._transfer_lines(), ""]
        lines += [*self._size_lines(), "", *self._difference_lines()]
        if self.study.kind == "curve":
            lines += ["", *self._advice_lines()]
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """As `save_figures`."""
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        save_figures(path, text, self.as_markdown())

    def _heading(self) -> str:
        seeds = len(self.study.of_size(self.study.sizes[0]))
        rows = ", ".join(
            f"{count:,} {origin} ({self.violating[origin]:,} violate)"
            for origin, count in self.tested.items()
        )
        source = self.study.data or "the rule's own rows"
        if self.study.labelled_for:
            source += f", labelled for {self.study.labelled_for}"
        return (
            f"{self.study.rule} on {self.model}, {source}. AUROC with 95 % intervals, bootstrap "
            f"over rows' groups and {seeds} seeds. Test rows: {rows}."
        )

    def _transfer_lines(self) -> list[str]:
        """With the fewest real rows: the flattering figure beside the honest one."""
        fewest = self.study.sizes[0]
        rows = []
        for method in self.methods:
            cells = [self.cell(fewest, method, origin) for origin in ("generated", "real")]
            rows.append([label_of(method), *map(_auroc, cells)])
        head = [f"trained on generated rows and {fewest} real", "generated rows", "real rows"]
        return [markdown_table(head, rows)]

    def _size_lines(self) -> list[str]:
        """Methods against numbers of rows, on real test rows."""
        rows = []
        for method in self.methods:
            cells = [self.cell(size, method) for size in self.study.sizes]
            rows.append([label_of(method), *map(_auroc, cells)])
        head = ["rows, about a fifth of them validation"]
        if self.study.kind == "transfer":
            head = ["real rows mixed in, about a fifth of them validation"]
        return [markdown_table([*head, *(f"{size:,}" for size in self.study.sizes)], rows)]

    def _difference_lines(self) -> list[str]:
        """Between every two methods, bold where chance does not explain it."""
        columns: list[tuple[int, Origin]] = [(size, "real") for size in self.study.sizes]
        head = ["difference of AUROC", *(f"{size:,} rows" for size in self.study.sizes)]
        if self.study.kind == "transfer":
            columns.insert(0, (self.study.sizes[0], "generated"))
            head.insert(1, f"{self.study.sizes[0]} rows, on generated ones")
        by_pair: dict[tuple[str, str], dict[tuple[int, Origin], StudyDifference]] = {}
        for difference in self.differences:
            pair = by_pair.setdefault((difference.minuend, difference.subtrahend), {})
            pair[difference.rows, difference.origin] = difference
        rows = []
        for (minuend, subtrahend), by_column in by_pair.items():
            name = f"{label_of(minuend)} minus {label_of(subtrahend)}"
            rows.append([name, *(_signed(by_column[column]) for column in columns)])
        return [markdown_table(head, rows), "", "Bold: the interval of the pairs excludes 0."]

    def _advice_lines(self) -> list[str]:
        """How many rows, and which method."""
        lines = []
        for size in self.study.sizes:
            best = max(self.methods, key=lambda method: self.cell(size, method).auroc)
            lines.append(f"- {size:,} rows: {label_of(best)} is best{self._margin(size, best)}.")
        most = self.study.sizes[-1]
        for method in self.methods:
            lines.append(
                f"- {label_of(method)}: from {self._enough(method):,} rows on no more than "
                f"{SUFFICIENT:g} below its AUROC with {most:,}."
            )
        return lines

    def _enough(self, method: str) -> int:
        """The fewest rows that are sufficient, as all larger numbers of them are."""
        enough = self.study.sizes[-1]
        last = self.cell(enough, method).auroc
        for size in reversed(self.study.sizes):
            if self.cell(size, method).auroc < last - SUFFICIENT:
                break
            enough = size
        return enough

    def _margin(self, size: int, best: str) -> str:
        """Whether `best` is clear of the bag of words."""
        if best == BAG_OF_WORDS:
            return ""
        for difference in self.differences:
            key = (difference.rows, difference.origin, difference.minuend, difference.subtrahend)
            if key == (size, "real", best, BAG_OF_WORDS):
                clear = "clear of" if difference.is_clear else "not clear of"
                return f", {clear} the bag of words ({_signed(difference)})"
        raise KeyError((size, best))


def _auroc(cell: StudyCell) -> str:
    return f"{cell.auroc:.3f} [{cell.ci95[0]:.3f}, {cell.ci95[1]:.3f}]"


def _signed(difference: StudyDifference) -> str:
    low, high = difference.ci95
    text = f"{difference.difference:+.3f} [{low:+.3f}, {high:+.3f}]"
    if difference.is_clear:
        return f"**{text}**"
    return text


def study_report_path(folder: Path, model: str) -> Path:
    """The JSON file of a study's report on one model."""
    return folder / f"{model}.json"
