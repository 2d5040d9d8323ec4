"""Counts how often the host waits for the device while a step's low-rank kernels are prepared.

It needs no device: a call counts by its name and by where its tensors would lie. Knows nothing of
steps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from vllm.lora.ops.triton_ops import LoRAKernelMeta
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

# Calls whose result, or the size of it, the host has to know.
READS = frozenset(
    [
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__contains__",
        "equal",
        "allclose",
        "unique",
        "unique_consecutive",
        "nonzero",
        "argwhere",
        "masked_select",
        "repeat_interleave",
    ]
)
# Calls that write into their first argument.
WRITES = frozenset(["__setitem__", "copy_", "fill_"])
# The kernels' metadata that vLLM keeps on the host; everything else is on the device.
ON_HOST = ("no_lora_flag_cpu", "num_active_loras_cpu", "default_num_active_loras_cpu")


class CountedWaits(TorchFunctionMode):
    """Counts the calls in its block that wait for the device. All tensors lie on it, except
    `on_host` and parts of them.
    """

    def __init__(self, on_host: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.waits = 0
        self._on_host = {tensor.untyped_storage().data_ptr() for tensor in on_host}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the call, and count it if it waits."""
        if func.__name__ in READS:
            self.waits += self._any_on_device(args)
        elif func.__name__ in WRITES:
            self.waits += self._any_on_device(args[1:]) and not self._any_on_device(args[:1])
        return func(*args, **(kwargs or {}))

    def _any_on_device(self, values: Iterable[object]) -> bool:
        """Whether one of the values is a tensor on the device; a number is on the host."""
        for value in values:
            if isinstance(value, torch.Tensor) and not self._is_on_host(value):
                return True
        return False

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_host


class Waits(NamedTuple):
    """How often the plugin makes the host wait, and how often vLLM would."""

    of_plugin: int
    of_vllm: int


class KernelWaits:
    """The waits of preparing the kernels since the last `take`."""

    def __init__(self) -> None:
        self._waits = Waits(0, 0)

    def watch(self) -> None:
        """Count from now on in this process, in which the plugin is installed."""
        update_metadata = PunicaWrapperGPU.update_metadata

        @functools.wraps(update_metadata)
        def counted(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            tokens, prompts = wrapper.token_mapping_meta, wrapper.prompt_mapping_meta
            ours = CountedWaits([*_on_host(tokens), *_on_host(prompts)])
            with ours:
                update_metadata(wrapper, *args, **kwargs)
            vllms = waits_of_vllm(tokens, wrapper.token_lora_indices)
            vllms += waits_of_vllm(prompts, wrapper.sampler_indices)
            so_far = self._waits
            self._waits = Waits(so_far.of_plugin + ours.waits, so_far.of_vllm + vllms)

        setattr(PunicaWrapperGPU, "update_metadata", counted)  # noqa: B010 - mypy knows its type

    def take(self) -> Waits:
        """Return the waits since the last `take`, and set them to 0."""
        waits = self._waits
        self._waits = Waits(0, 0)
        return waits


def waits_of_vllm(metadata: Any, slots: torch.Tensor) -> int:
    """How often vLLM's own code waits while it prepares a copy of the metadata for these slots.

    Raises AttributeError where the plugin has not replaced it.
    """
    prepare_tensors: Any = LoRAKernelMeta.prepare_tensors
    metadata_copy = copy.deepcopy(metadata)
    vllms = CountedWaits(_on_host(metadata_copy))
    with vllms:
        prepare_tensors.__wrapped__(metadata_copy, slots)
    return vllms.waits


def _on_host(metadata: Any) -> list[torch.Tensor]:
    return [getattr(metadata, name) for name in ON_HOST]
