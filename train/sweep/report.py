"""What a sweep has measured, as a table and advice. Knows nothing of training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from guard.files.yaml_file import Strict


class SweepPoint(Strict):
    """One combination with one seed: metrics of the validation split. `point` names the
    combination, `inputs` is the fingerprint of its adapter, `correct` says which validation rows
    were judged right, `groups` which of them share a context, by number.
    """

    point: str
    rank: int
    seed: int
    inputs: str
    accuracy: float
    auroc: float
    nll: float
    correct: list[bool]
    groups: list[int]


def by_combination(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """The points of each combination, seeds together, in the grid's order."""
    combinations: dict[str, list[SweepPoint]] = {}
    for point in points:
        combinations.setdefault(point.point, []).append(point)
    return combinations


def advice(points: Sequence[SweepPoint]) -> tuple[str, float]:
    """The combination of smallest rank that is not worse than the best one beyond noise. And how
    much worse it is, in accuracy. Each rank stands by its best combination. Noise is that of the
    validation rows: the 95 % interval of the mean paired difference of the rows' correctness, each
    averaged over the seeds; rows of one group stand or fall together.
    """
    correct: dict[str, np.ndarray] = {}
    by_rank: dict[int, list[str]] = {}
    for name, seeds in by_combination(points).items():
        correct[name] = np.mean([point.correct for point in seeds], axis=0)
        by_rank.setdefault(seeds[0].rank, []).append(name)
    best = max(correct, key=lambda name: correct[name].mean())
    for rank in sorted(by_rank):
        best_of_rank = max(by_rank[rank], key=lambda name: correct[name].mean())
        worse = correct[best] - correct[best_of_rank]
        if worse.mean() <= 1.96 * _standard_error(worse, points[0].groups):
            return best_of_rank, float(worse.mean())
    raise AssertionError("the best combination is not worse than itself")


def _standard_error(values: np.ndarray, groups: Sequence[int]) -> float:
    """The standard error of the mean, by the spread of the groups' sums; infinite for one group,
    which shows none.
    """
    sums = np.bincount(groups, weights=values - values.mean())
    if len(sums) < 2:
        return np.inf
    return float(sums.std(ddof=1) * len(sums) ** 0.5 / len(values))


def table(points: Sequence[SweepPoint], seeds: int) -> str:
    """Markdown: a line for each combination, with mean and range over the `seeds` that are trained,
    and the rank to take.
    """
    if not points:
        return "No adapter was trained; the errors stand above."
    lines = ["| settings | seeds | accuracy % | range | AUROC | nll |", "|---|---|---|---|---|---|"]
    complete: list[SweepPoint] = []
    for name, trained in by_combination(points).items():
        lines.append(_table_row(name, trained, seeds))
        if len(trained) == seeds:
            complete += trained
    return "\n".join([*lines, "", _conclusion(complete)])


def _table_row(name: str, trained: Sequence[SweepPoint], seeds: int) -> str:
    accuracy = [100 * point.accuracy for point in trained]
    auroc = sum(point.auroc for point in trained) / len(trained)
    nll = sum(point.nll for point in trained) / len(trained)
    spread = f"{np.mean(accuracy):.1f} | {min(accuracy):.1f} to {max(accuracy):.1f}"
    return f"| {name} | {len(trained)} of {seeds} | {spread} | {auroc:.3f} | {nll:.3f} |"


def _conclusion(complete: Sequence[SweepPoint]) -> str:
    if not complete:
        return "No settings were trained with all seeds; the errors stand above."
    name, worse = advice(complete)
    rows = len(complete[0].correct)
    return (
        f"Smallest rank within noise of the best ({rows} validation rows): **{name}**, "
        f"{100 * worse:.1f} points below it."
    )
