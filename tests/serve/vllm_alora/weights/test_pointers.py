"""What the kernels remember of a closed engine's slots is dropped, and of no other's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.ops.triton_ops import utils
from vllm_alora.weights.pointers import forget_pointers

pytestmark = pytest.mark.slow


def manager(*layers: Any) -> Any:
    modules = {str(number): layer for number, layer in enumerate(layers)}
    return SimpleNamespace(_adapter_manager=SimpleNamespace(modules=modules))


def layer(slices: int) -> Any:
    """A layer with slots for two adapters of rank 4, for one projection or several packed."""
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.zeros(2, 1, 4, 8) for _ in range(slices)),
        lora_b_stacked=tuple(torch.zeros(2, 1, 8, 4) for _ in range(slices)),
    )


def test_the_slots_of_a_closed_engine_are_forgotten_and_those_of_another_stay() -> None:
    tables = (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT)
    assert not any(tables)
    closed, other = [layer(1), layer(3)], [layer(1)]
    for each in (*closed, *other):
        utils._get_lora_a_ptr(list(each.lora_a_stacked), torch.device("cpu"))
        utils._get_lora_b_ptr(list(each.lora_b_stacked), 0, torch.device("cpu"))
    assert [len(table) for table in tables] == [3, 3]
    forget_pointers(manager(*closed))
    (a,), (b,) = tables
    assert a == (other[0].lora_a_stacked[0].data_ptr(),)
    assert b == (other[0].lora_b_stacked[0].data_ptr(),)
    forget_pointers(manager(*other))
    assert not any(tables)
