"""A retest's figures as JSON and Markdown. Knows nothing of how they were measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from eval.markdown import interval_cell, markdown_table
from guard.files.figures import save_figures
from guard.files.yaml_file import Strict


class DrawAccuracy(Strict):
    """The accuracy of one method on one rule, over all seeds.

    `change`: the second draw's accuracy minus the first's.
    """

    first: float
    first_ci95: tuple[float, float]
    second: float
    second_ci95: tuple[float, float]
    change: float
    change_ci95: tuple[float, float]

    @property
    def has_no_change(self) -> bool:
        """Whether chance explains the change."""
        return self.change_ci95[0] <= 0 <= self.change_ci95[1]


class RetestedRule(Strict):
    """The figures of one rule.

    `dropped`: rows of the second draw that came close to a row of the first.
    """

    n_first: int
    n_second: int
    dropped: int
    seeds: tuple[int, ...]
    methods: dict[str, DrawAccuracy]
    strata: dict[str, dict[str, DrawAccuracy]]  # by `meta.stratum`, then by method
    ece: dict[str, float | None]  # on both draws together: twice the rows; mean over seeds
    ece_expected: dict[str, float | None]  # under perfect calibration, on the same rows


class Retest(Strict):
    """All rules, and the mean change over them by method, with its 95 % interval."""

    model: str
    data: str
    left_out: tuple[str, ...]  # rules without a second draw, and why
    rules: dict[str, RetestedRule]
    mean_change: dict[str, float]
    mean_change_ci95: dict[str, tuple[float, float]]
    mean_ece: dict[str, float | None]
    mean_ece_expected: dict[str, float | None]
    commit: str
    hardware: str
    versions: dict[str, str]

    def as_markdown(self) -> str:
        """The table as Markdown: a row for each rule and method."""
        head = ["rule", "method", "first", "second", "change", "rows", "dropped"]
        rows = [*self._rule_rows(), *self._mean_rows()]
        lines = [
            f"Accuracy in percent on {self.data}, an independent second test draw, beside the "
            "first (95 % intervals; change = second minus first)",
            "",
            markdown_table(head, rows),
            "",
            "Expected calibration error on both draws together, mean over rules and seeds: "
            + ", ".join(self._calibration()),
        ]
        return "\n".join([*lines, *(f"\nLeft out: {reason}" for reason in self.left_out)])

    def save(self, path: Path) -> None:
        """Write JSON to `path` and the table beside it, each whole or not at all."""
        save_figures(path, json.dumps(self.model_dump(mode="json"), indent=1), self.as_markdown())

    def _rule_rows(self) -> Iterator[list[str]]:
        for name, rule in self.rules.items():
            for method, accuracy in rule.methods.items():
                yield [name, method, *_cells(accuracy), str(rule.n_second), str(rule.dropped)]
                for stratum, by_method in rule.strata.items():
                    yield ["", f"{method}, {stratum}", *_cells(by_method[method]), "", ""]

    def _mean_rows(self) -> Iterator[list[str]]:
        for method, change in self.mean_change.items():
            unchanged = [rule.methods[method].has_no_change for rule in self.rules.values()]
            share = f"{sum(unchanged)} of {len(unchanged)}"
            mean = _points(change, self.mean_change_ci95[method])
            alike = f"no change within its interval: {share}"
            yield ["**mean**", method, "", alike, f"**{mean}**", "", ""]

    def _calibration(self) -> Iterator[str]:
        for method, ece in self.mean_ece.items():
            if ece is not None:
                yield f"{method} {ece:.3f} (expected {self.mean_ece_expected[method]:.3f})"


def _cells(accuracy: DrawAccuracy) -> list[str]:
    """The cells for the first draw, the second draw and the change."""
    return [
        f"{100 * accuracy.first:.1f} {interval_cell(accuracy.first_ci95)}",
        f"{100 * accuracy.second:.1f} {interval_cell(accuracy.second_ci95)}",
        _points(accuracy.change, accuracy.change_ci95),
    ]


def _points(change: float, ci95: tuple[float, float]) -> str:
    return f"{100 * change:+.1f} [{100 * ci95[0]:+.1f}, {100 * ci95[1]:+.1f}]"
