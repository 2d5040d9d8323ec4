"""Seams: a step's copies of partial blocks (`partial_block.py`), in the worker.

Whole blocks are copied before and after the forward pass. What is shared in it is written as vLLM
writes it, layer by layer: after the step's own keys and values and before anything attends to them,
the partial block's rows once more, into the blocks of those that begin with it. Every attention
backend that writes before it attends does so through one method, which is called by Python in a
step that is no graph's: compiled pieces call it as an operator. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ..seam import seam
from .partial_block import WRITES_SHARES, Copies, Share


class SharedRows:
    """The rows of a step's shared partial blocks, and the slots into which layers write them too.

    int64, [rows of all sharers], on the device of what they index.
    """

    def __init__(self, shares: Sequence[Share], block_size: int) -> None:
        self.shares = shares
        self._block_size = block_size
        self._rows_and_slots: tuple[torch.Tensor, torch.Tensor] | None = None
        self.layers = 0  # that have written them

    def of(self, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and slots in a step whose row i is written to `slot_mapping[i]`.

        The same for all layers.
        """
        if self._rows_and_slots is None:
            self._rows_and_slots = self._find(slot_mapping)
        self.layers += 1
        return self._rows_and_slots

    def _find(self, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a share begins is looked for on the device, because reading it would be to wait.

        So is whether it is there at all: if not, an error of the device.
        """
        device = slot_mapping.device
        first_slots = [share.source * self._block_size + share.start for share in self.shares]
        is_first = slot_mapping == async_tensor_h2d(first_slots, device, torch.long)[:, None]
        torch._assert_async(is_first.any(1).all())
        columns = torch.cat([self._of_share(*numbered) for numbered in enumerate(self.shares)], 1)
        number, offset, slots = async_tensor_h2d(columns, device)
        return is_first.int().argmax(1)[number] + offset, slots

    def _of_share(self, number: int, share: Share) -> torch.Tensor:
        """For each row that a share adds, the share's number, the row's offset in it, and its slot;
        int64, [3, rows of its sharers], on the host.
        """
        inside = torch.arange(share.start, share.stop)
        slots = torch.tensor(share.blocks)[:, None] * self._block_size + inside
        offset = (inside - share.start).expand_as(slots)
        return torch.stack([torch.full_like(slots, number), offset, slots]).flatten(1)


# Of the step that is under way.
_shared_rows: ContextVar[SharedRows | None] = ContextVar("shared_rows", default=None)


@seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "self scheduler_output intermediate_tensors",
)
def execute_model_v1(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """The step, between its copies."""
    return _between_copies(original, self, scheduler_output, *args, **kwargs)


@seam(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile "
    "context_len valid_dummy_state_slots randomize_inputs",
)
def execute_model_v2(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """The step, between its copies."""
    return _between_copies(original, self, scheduler_output, *args, **kwargs)


@seam(
    "vllm.model_executor.layers.attention.attention:Attention.__init__",
    "self num_heads head_size scale num_kv_heads alibi_slopes use_alibi_sqrt cache_config "
    "quant_config logits_soft_cap per_layer_sliding_window prefix attn_type "
    "kv_sharing_target_layer_name mm_prefix_clamp_sliding_window attn_backend head_size_v "
    "extra_impl_args",
)
def attention_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """A layer whose backend writes before it attends writes what a step shares, too.

    Whichever backend it is: all have the method of that name, and each layer its own instance.
    """
    original(self, *args, **kwargs)
    write = getattr(self.impl, "do_kv_cache_update", None)
    has_own_keys = self.kv_sharing_target_layer_name is None
    if write and has_own_keys and not self.attn_backend.forward_includes_kv_cache_update:
        self.impl.do_kv_cache_update = functools.partial(write_and_share, write)
        setattr(self, WRITES_SHARES, True)


def write_and_share(
    write: Callable[..., None],
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: Any,
    slot_mapping: torch.Tensor,
) -> None:
    """One layer's new keys and values, [rows, heads, size], into their slots.

    Those of the shared partial blocks into all that use them.
    """
    write(layer, key, value, kv_cache, slot_mapping)
    shared = _shared_rows.get()
    if shared:
        rows, slots = shared.of(slot_mapping)
        write(layer, key[rows], value[rows], kv_cache, slots)


@torch.inference_mode()
def _between_copies(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    computed_before = getattr(runner, "scheduled_tokens", 0)
    runner.scheduled_tokens = computed_before + scheduler_output.total_num_scheduled_tokens
    copies = scheduler_output.kv_connector_metadata
    if not isinstance(copies, Copies):
        return original(runner, scheduler_output, *args, **kwargs)
    layers = []
    if copies.loads or copies.saves:  # who shares also saves
        layers = _layers(runner)
    # Slot -> its block in every layer.
    slots: dict[int, list[torch.Tensor]] = vars(runner).setdefault("partial_block_slots", {})
    for slot, block_ids in copies.loads.items():
        _load(layers, slots[slot], block_ids)
    for share in copies.shares:
        if share.start:
            begun = [blocks[share.source].clone() for blocks in layers]
            _load(layers, begun, share.blocks)
    with _sharing(copies.shares, runner.cache_config.block_size, len(layers)):
        output = original(runner, scheduler_output, *args, **kwargs)
    for slot, block_id in copies.saves.items():
        slots[slot] = [blocks[block_id].clone() for blocks in layers]
    return output


def _load(
    layers: Sequence[torch.Tensor], slot: Sequence[torch.Tensor], block_ids: Sequence[int]
) -> None:
    """Copy what a slot holds of every layer into these blocks."""
    index = async_tensor_h2d(list(block_ids), layers[0].device, torch.long)
    for blocks, kept in zip(layers, slot, strict=True):
        blocks.index_copy_(0, index, kept.expand(len(block_ids), *kept.shape))


@contextlib.contextmanager
def _sharing(shares: Sequence[Share], block_size: int, layers: int) -> Iterator[None]:
    """A forward pass in which every one of `layers` writes the shared rows.

    Raises RuntimeError if one has not.
    """
    shared = SharedRows([share for share in shares if share.start < share.stop], block_size)
    token = _shared_rows.set(shared if shared.shares else None)
    try:
        yield
    finally:
        _shared_rows.reset(token)
    if shared.shares and shared.layers != layers:
        raise RuntimeError(
            f"{shared.layers} of {layers} layers have shared the step's partial blocks: "
            "answers would be wrong"
        )


def _layers(runner: Any) -> list[torch.Tensor]:
    """Every layer's keys and values, [blocks, ...].

    Attention kernels may cut a block into several smaller ones.
    """
    return [
        layer.unflatten(0, (runner.kv_cache_config.num_blocks, -1)) for layer in runner.kv_caches
    ]
