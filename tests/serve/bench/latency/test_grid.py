"""The grid of the two sweeps: its points, their repeats and lengths."""

from __future__ import annotations

import pytest

from serve.bench.latency.grid import (
    BASE,
    LORA_REPEATS,
    Cell,
    by_engine,
    full_grid,
    label_of,
    quick_grid,
    shares_conversation,
)

BLOCK = 32


@pytest.mark.parametrize(("tokens", "repeats"), [(1000, 1), (1000, 5), (100, 2), (5000, 32)])
def test_what_is_beyond_whole_blocks_is_spread_evenly_over_the_repeats(
    tokens: int, repeats: int
) -> None:
    cell = Cell(tokens, 5, repeats)
    lengths = [cell.length(number, BLOCK) for number in range(repeats)]
    assert all(abs(length - tokens) <= BLOCK // 2 for length in lengths)
    assert abs(sum(length % BLOCK for length in lengths) / repeats - BLOCK / 2) <= 1
    assert len({length % BLOCK for length in lengths}) == repeats


def points(cells: list[Cell]) -> set[tuple[int, int]]:
    return {(cell.prompt_tokens, cell.rules) for cell in cells}


def test_the_full_grid_holds_both_sweeps_once() -> None:
    grid = full_grid(20)
    for length in (1000, 5000):
        assert {(length, rules) for rules in (1, 5, 10, 20, 50, 100)} <= points(grid)
    assert {(length, 5) for length in (100, 250, 500, 1000, 2000, 5000)} <= points(grid)
    assert len(grid) == len(points(grid)) == 16
    assert {cell.times("alora") for cell in grid} == {20}
    assert {cell.times("lora") for cell in grid} == {LORA_REPEATS}


def test_only_what_shares_the_conversation_computes_it_once() -> None:
    assert [shares_conversation(mode) for mode in (BASE, "lora", "alora")] == [True, False, True]
    cell = Cell(1000, 10, 1)
    assert cell.tokens("lora") - cell.tokens("alora") == 9 * 1000
    assert cell.tokens("alora") == cell.tokens(BASE)
    assert [label_of(mode) for mode in (BASE, "lora", "alora")] == ["bare base", "LoRA", "aLoRA"]


def test_what_is_beyond_the_sweeps_is_measured_when_asked_for_and_in_engines_of_its_own() -> None:
    wide = full_grid(5, wide=True)
    beyond = {(1000, 200), (1000, 500), (10_000, 5), (20_000, 5), (32_000, 5)}
    assert points(wide) - points(full_grid(5)) == beyond
    assert by_engine(full_grid(5)) == [full_grid(5)]
    parts = [points(part) for part in by_engine(wide)]
    assert sorted(map(len, parts)) == [3, 18]  # every number of rules in one engine
    assert {(1000, 10), (1000, 500)} <= max(parts, key=len)


def test_the_quick_grid_ends_with_the_largest_cell_once_and_only_if_time_allows() -> None:
    *cells, last = quick_grid(5)
    assert (1000, 100) in points(cells)
    assert not any(cell.optional for cell in cells)
    assert last == Cell(5000, 100, 1, optional=True)
