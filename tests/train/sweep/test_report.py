"""What a sweep advises: the smallest rank within noise of the best, of complete combinations."""

from __future__ import annotations

import pytest

from train.sweep.report import SweepPoint, advice, by_combination, table


def sweep_point(name: str, rank: int, seed: int, right: int, group_rows: int = 1) -> SweepPoint:
    rows = {"correct": [row < right for row in range(100)]}
    rows["groups"] = [row // group_rows for row in range(100)]
    figures = {"accuracy": right / 100, "auroc": 0.5, "nll": 0.7}
    return SweepPoint(point=name, rank=rank, seed=seed, inputs=f"{name}{seed}", **figures, **rows)


def test_the_smallest_rank_within_noise_of_the_best_is_advised() -> None:
    ranks = {4: 50, 8: 88, 16: 80, 32: 90}  # 2 of 100 rows less is noise, 10 and 40 are not
    points = []
    for rank, right in ranks.items():
        points += [sweep_point(f"r={rank}", rank, seed, right) for seed in (0, 1)]
    assert advice(points) == ("r=8", pytest.approx(0.02))
    told = table(points, 2)
    assert "100 validation rows): **r=8**, 2.0 points below it" in told
    assert "| r=8 | 2 of 2 | 88.0 | 88.0 to 88.0 |" in told


@pytest.mark.parametrize(("group_rows", "rank"), [(1, 8), (5, 4), (100, 4)])
def test_rows_that_stand_or_fall_together_are_less_certain(group_rows: int, rank: int) -> None:
    """Ten rows less are beyond chance, unless they are two groups of twenty, or all are one."""
    points = [sweep_point(f"r={r}", r, 0, right, group_rows) for r, right in ((4, 80), (8, 90))]
    assert advice(points)[0] == f"r={rank}"


def test_a_point_without_all_its_seeds_is_told_so_and_not_advised() -> None:
    points = [sweep_point("r=4", 4, 1, 99), *(sweep_point("r=8", 8, seed, 90) for seed in (0, 1))]
    told = table(points, 2)
    assert "| r=4 | 1 of 2 |" in told
    assert "**r=8**, 0.0 points below it" in told
    assert "No settings were trained with all seeds" in table(points[:1], 2)


def test_each_rank_stands_by_its_best_point() -> None:
    tried = (("r=4 lr=1", 4, 60), ("r=4 lr=2", 4, 89), ("r=8 lr=1", 8, 90))
    points = [sweep_point(name, rank, 0, right) for name, rank, right in tried]
    assert advice(points)[0] == "r=4 lr=2"


def test_combinations_keep_the_order_of_the_grid_with_their_seeds_together() -> None:
    points = [sweep_point("b", 1, 0, 3), sweep_point("a", 2, 0, 4), sweep_point("b", 1, 1, 5)]
    assert by_combination(points) == {"b": [points[0], points[2]], "a": [points[1]]}
