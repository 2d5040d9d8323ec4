"""A launch covers the step's work, and a captured one vLLM's whole grid. That vLLM's own kernels
give the same bits: tests/serve/gpu_path/ring_kernels.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_alora import launch_grid
from vllm_alora.launch_grid import BoundedKernel, Work, work_of
from vllm_alora.seam import SeamError

NAMES = ["x", "M", "lora_ids", "BLOCK_M"]


class ToyKernel:
    arg_names = NAMES

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: (grid, args[1])


def test_the_work_of_a_step() -> None:
    assert work_of([]) is None
    assert work_of([0, 0]) is None
    assert work_of([0, 7, 7, 0, 7, 3]) == Work(tokens=3, ids=3)
    assert work_of([4]) == Work(tokens=1, ids=1)


def test_a_launch_has_the_tiles_of_the_longest_adapter_and_the_ids_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.zeros(129, dtype=torch.int32)
    launch = BoundedKernel(ToyKernel())[(8 * 235, 3, 129)]
    assert launch("x", 7500, ids, 32) == ((8 * 235, 3, 129), 7500)  # nothing is known of the step
    monkeypatch.setitem(launch_grid._work, ids.data_ptr(), Work(tokens=40, ids=101))
    assert launch("x", 7500, ids, 32) == ((8 * 2, 3, 101), 64)
    monkeypatch.setattr(launch_grid, "_is_capturing", lambda: True)
    assert launch("x", 7500, ids, 32) == ((8 * 235, 3, 129), 7500)


def test_a_kernel_with_other_parameters_is_refused() -> None:
    with pytest.raises(SeamError, match="no BLOCK_M"):
        BoundedKernel(SimpleNamespace(arg_names=NAMES[:3]))
