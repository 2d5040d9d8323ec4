"""A wait is a read of what lies on the device, or a copy of it to the host, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import vllm_alora
from vllm.lora.ops.triton_ops import LoRAKernelMeta
from vllm.utils.torch_utils import async_tensor_h2d

from serve.bench.gpu_counts.waits import CountedWaits, waits_of_vllm

pytestmark = pytest.mark.slow

Use = Callable[[torch.Tensor, torch.Tensor], object]

WAITING: dict[str, Use] = {
    "a number is read": lambda device, _: device[1].item(),
    "a list is read": lambda device, _: device.tolist(),
    "an array is read": lambda device, _: np.asarray(device),
    "a flag is read": lambda device, _: bool((device == 1).all()),
    "all is copied to the host": lambda device, _: device.cpu(),
    "a number is copied to the host": lambda device, host: host.__setitem__(0, device.sum()),
    "a part is copied to the host": lambda device, host: host.copy_(device[:2], True),
    "a size is asked for": lambda device, _: torch.unique(device, return_counts=True),
    "places are asked for": lambda device, _: device.nonzero(),
}
NOT_WAITING: dict[str, Use] = {
    "a number of the host is read": lambda _, host: host[0].item(),
    "a number is written on the host": lambda _, host: host.__setitem__(0, 7),
    "the device computes": lambda device, _: torch.sort(device * 2)[0].cumsum(0),
    "the device is written": lambda device, host: device[:2].copy_(host),
    "values go to the device": lambda device, _: async_tensor_h2d(
        np.array([1, 2], np.int64), out=device[:2]
    ),
}


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()


def waits_of(use: Use) -> int:
    device, host = torch.arange(4), torch.zeros(2, dtype=torch.int64)
    with CountedWaits([host]) as counted:
        use(device, host)
    return counted.waits


@pytest.mark.parametrize("use", WAITING.values(), ids=WAITING)
def test_what_the_host_has_to_know_of_the_device_is_a_wait(use: Use) -> None:
    assert waits_of(use) == 1


@pytest.mark.parametrize("use", NOT_WAITING.values(), ids=NOT_WAITING)
def test_what_the_host_has_or_the_device_does_by_itself_is_none(use: Use) -> None:
    assert waits_of(use) == 0


@pytest.mark.parametrize(("slots", "waits"), [([-1, 2, 2, 0], 3), ([-1, -1], 2)])
def test_vllm_waits_on_a_copy(slots: list[int], waits: int) -> None:
    metadata = LoRAKernelMeta.make(4, 8, "cpu")
    metadata.active_lora_ids.fill_(7)
    assert waits_of_vllm(metadata, torch.tensor(slots)) == waits
    assert metadata.active_lora_ids.tolist() == [7] * 5
