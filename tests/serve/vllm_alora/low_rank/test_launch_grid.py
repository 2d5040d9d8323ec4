"""The kernels' metadata of a step from the host, and which launches are bounded. That they are, and
give the same bits: tests/serve/gpu_path/ring_kernels.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm.config import CUDAGraphMode
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm_alora.low_rank import launch_grid
from vllm_alora.low_rank.launch_grid import BoundedKernel, prepare_tensors
from vllm_alora.seam import SeamError

pytestmark = pytest.mark.slow

SLOTS, TOKENS = 6, 40
FIELDS = [field.name for field in dataclasses.fields(LoRAKernelMeta)]


def metadata(slots: list[int], *, from_host: bool, counts: list[int] | None = None) -> Any:
    """The kernels' metadata of a step that comes after another one."""
    meta = LoRAKernelMeta.make(SLOTS, TOKENS, "cpu", counts)
    for tensor in (meta.token_lora_mapping, meta.token_indices_sorted_by_lora_ids):
        tensor.zero_()  # memory that nobody has written yet
    meta.prepare_tensors(torch.tensor([3, 3, 0, -1]))
    if from_host:
        meta.host_slots = np.array(slots, np.int64)
        prepare_tensors.wrapper(pytest.fail, meta, None)
    else:
        meta.prepare_tensors(torch.tensor(slots))
    return meta


@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=TOKENS),
    counts=st.sampled_from([[], [SLOTS + 1], [1, 2, 4, SLOTS + 1], [1, 2]]),
)
def test_kernels_metadata_of_the_host_is_the_device_s(slots: list[int], counts: list[int]) -> None:
    """With the counts of vLLM's default, [slots + 1], too."""
    mine = metadata(slots, from_host=True, counts=counts)
    vllms = metadata(slots, from_host=False, counts=counts)
    for name in FIELDS:
        ours, expected = getattr(mine, name), getattr(vllms, name)
        if isinstance(expected, torch.Tensor):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected), name


@pytest.mark.parametrize(
    ("mode", "largest"),
    [(CUDAGraphMode.NONE, 0), (CUDAGraphMode.FULL_AND_PIECEWISE, 512), (CUDAGraphMode.FULL, 512)],
)
def test_a_wrapper_knows_the_largest_graph_of_its_engine(
    mode: CUDAGraphMode, largest: int, monkeypatch: MonkeyPatch
) -> None:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=512)
    )
    monkeypatch.setattr(launch_grid, "KERNELS", ())
    monkeypatch.setattr(launch_grid, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(launch_grid, "_graphs", launch_grid.Graphs())
    launch_grid.init.wrapper(lambda *_: None, object())
    assert launch_grid._graphs.largest == largest


def test_a_kernel_with_other_parameters_is_refused() -> None:
    with pytest.raises(SeamError, match="no BLOCK_M"):
        BoundedKernel(SimpleNamespace(arg_names=["x", "M", "lora_ids"]))
