"""Seams: on a GPU the low-rank kernels are launched where there is work, not over the whole step.

vLLM launches its Triton kernels over (all tokens of the step) x (slots + 1), of which nearly all
programs find nothing to do: a rule's suffix is one tile. Here a launch covers the tiles of the
adapter with most tokens, and the adapters of the step. Steps that may be a captured graph's keep
vLLM's grid, in its warm-up too. What the kernels read of the step is made on the host: vLLM's way
waits for the device. Remove when vLLM bounds its grid so (a TODO in its `lora_shrink_op.py`) and
prepares the metadata without waiting (another in its `punica_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.triton_utils import triton
from vllm.utils.torch_utils import async_tensor_h2d

from ..seam import SeamError, seam
from ..token_map import NO_SLOT, Ints, slots_of_step

KERNELS = ((lora_shrink_op, "_lora_shrink_kernel"), (lora_expand_op, "_lora_expand_kernel"))


class Work(NamedTuple):
    """A step's work: the most tokens of an adapter, and the ids, "no adapter" included."""

    tokens: int
    ids: int


# Address of a wrapper's `active_lora_ids` -> its step's work: a kernel gets the wrapper's tensors,
# not the wrapper.
_work: dict[int, Work] = {}


def work_of(slots: Ints) -> Work | None:
    """The work of a step, from each token's slot, -1 for none; None without an adapter."""
    ids, counts = np.unique(slots, return_counts=True)
    adapter_tokens = counts[ids != NO_SLOT]
    if not adapter_tokens.size:
        return None
    return Work(int(adapter_tokens.max()), len(ids))


@dataclass
class Graphs:
    """The tokens of the largest graph that an engine of this process captures; 0 for none."""

    largest: int = 0


_graphs = Graphs()


class BoundedKernel:
    """A low-rank kernel of vLLM's, launched over its step's work. Raises SeamError for another."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        names = list(kernel.arg_names)
        missing = {"M", "lora_ids", "BLOCK_M"} - set(names)
        if missing:
            raise SeamError(f"vllm_alora: a low-rank kernel has no {', '.join(sorted(missing))}")
        self._m, self._ids = names.index("M"), names.index("lora_ids")
        self._block_m = names.index("BLOCK_M")

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        """What launches the kernel over at most `grid`: tiles, slices, ids."""

        def launch(*args: Any, **options: Any) -> Any:
            work = _work.get(args[self._ids].data_ptr())
            if work is None or args[self._m] <= _graphs.largest:
                return self.kernel[grid](*args, **options)
            block = args[self._block_m]
            tiles = triton.cdiv(work.tokens, block)
            all_tiles = triton.cdiv(args[self._m], block)
            bounded = list(args)
            # A multiple of 16, like most grids: Triton compiles a variant for others.
            bounded[self._m] = tiles * block
            smaller = (grid[0] // all_tiles * tiles, grid[1], min(work.ids, grid[2]))
            return self.kernel[smaller](*bounded, **options)

        return launch


@seam(
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.__init__",
    "self max_num_batched_tokens max_batches device kwargs",
)
def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Put the kernels of this process behind bounded launches, once."""
    original(self, *args, **kwargs)
    config = get_current_vllm_config_or_none()
    if config is not None:
        compilation = config.compilation_config
        if compilation.cudagraph_mode != CUDAGraphMode.NONE:
            largest = compilation.max_cudagraph_capture_size or 0
            _graphs.largest = max(_graphs.largest, largest)
    for module, name in KERNELS:
        kernel = getattr(module, name)
        if not isinstance(kernel, BoundedKernel):
            setattr(module, name, BoundedKernel(kernel))


@seam(
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata",
    "self mapping lora_index_to_id max_loras vocab_size kwargs",
)
def update_metadata(
    original: Callable[..., None],
    self: Any,
    mapping: Any,
    lora_index_to_id: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Note the coming step's work, and its slots for `convert_mapping` and `prepare_tensors`."""
    slots = slots_of_step(mapping, lora_index_to_id)
    mapping.step_slots = slots
    self.token_mapping_meta.host_slots = slots.tokens
    self.prompt_mapping_meta.host_slots = slots.prompts
    original(self, mapping, lora_index_to_id, *args, **kwargs)
    address = self.token_mapping_meta.active_lora_ids.data_ptr()
    _work.pop(address, None)
    work = work_of(slots.tokens)
    if work is not None:
        _work[address] = work


@seam(
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta.prepare_tensors",
    "self token_lora_mapping",
)
def prepare_tensors(
    original: Callable[..., None], self: Any, token_lora_mapping: torch.Tensor
) -> None:
    """What vLLM computes on the device and waits for, from the same slots on the host. The device's
    queue of work runs on: vLLM's way empties it six times a step.
    """
    slots = vars(self).pop("host_slots", None)
    if slots is None:
        original(self, token_lora_mapping)
        return
    self._reset()
    ids, counts = np.unique(slots, return_counts=True)
    has_adapters = bool((ids != NO_SLOT).any())
    self.no_lora_flag_cpu[0] = not has_adapters
    if not has_adapters:
        return
    # What graphs are captured for: the smallest number that is enough.
    enough = [count for count in self.captured_lora_counts if count >= len(ids)]
    self.num_active_loras_cpu[0] = min(enough, default=len(ids))
    columns = {
        "token_lora_mapping": slots,
        "token_indices_sorted_by_lora_ids": np.argsort(slots, kind="stable"),
        "active_lora_ids": ids,
        "num_tokens_per_lora": counts,
    }
    for name, values in columns.items():
        _fill(getattr(self, name)[: len(values)], values)
    _fill(self.lora_token_start_loc[1 : 1 + len(ids)], np.cumsum(counts))


def _fill(tensor: torch.Tensor, values: Ints) -> None:
    """Copy host values, [length], into a tensor of the device without waiting for it."""
    async_tensor_h2d(values.astype(np.int32), out=tensor)
