from __future__ import annotations

import pytest

from serve.bench.planning.swaps import (
    CHECKS,
    FLEET,
    HOST,
    RULES_A_CHECK,
    SLOTS,
    SwapRow,
    swap_rows,
    swaps_fitted,
)
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine
from tests.serve.bench.small_engine import small_recipe
from tests.serve.plan.on_paper import linear


def test_a_copy_and_a_read_are_told_apart() -> None:
    rows = []
    for number in range(30):
        swap_ins, loads = number % 4, number % 3
        wall_ms = 20.0 + 2.0 * swap_ins + 5.0 * loads
        rows.append(SwapRow(wall_ms=wall_ms, swap_ins=swap_ins, loads=loads))
    cost = swaps_fitted(rows, linear(tokens=1.0))
    assert (cost.swap_in_ms, cost.load_ms) == pytest.approx((2.0, 5.0))
    assert cost.step == linear(tokens=1.0).step


@pytest.mark.slow
def test_an_engine_with_few_slots_copies_and_reads() -> None:
    recipe = small_recipe()
    method = recipe.sharing_method
    with (
        random_adapters(recipe, [method], FLEET) as folders,
        GuardEngine(recipe, by_name(folders), max_loras=SLOTS, max_cpu_loras=HOST) as engine,
    ):
        rows = swap_rows(engine, recipe, method)
    assert len(rows) == CHECKS and all(row.wall_ms > 0 for row in rows)
    assert sum(row.swap_ins for row in rows) > CHECKS / 2
    assert 0 < sum(row.loads for row in rows) < CHECKS * RULES_A_CHECK
