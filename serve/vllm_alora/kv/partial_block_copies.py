"""Seams: a step's copies of partial blocks (`partial_block.py`), in the worker.

Whole blocks are copied before and after the forward pass. What is shared in it is copied layer by
layer, before the step's own keys and values are written, by the one method through which every
attention backend writes that does so before it attends. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ..seam import seam
from .partial_block import COPIES_SHARES, Copies, Share


class Places(NamedTuple):
    """The places of a step's shared partial blocks, the same in all layers; int64, on the device of
    the keys: the rows of all of them, these rows' slots, and the sharers' blocks of each.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    sharers: list[torch.Tensor]


class SharedBlocks:
    """The partial blocks that a step completes for other requests too: in every layer they are
    written first, and copied. `blocks`: the number of blocks of the cache.
    """

    def __init__(self, shares: Sequence[Share], block_size: int, blocks: int) -> None:
        self.shares = shares
        self.layers = 0  # that have copied them
        self._block_size, self._blocks = block_size, blocks
        self._places: Places | None = None

    def share(
        self,
        write: Callable[..., None],
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the partial blocks' rows of one layer, and copy these blocks before the rest."""
        if self._places is None:
            rows = self._rows(slot_mapping)
            sharers = [_on_device(share.blocks, rows.device) for share in self.shares]
            self._places = Places(rows, slot_mapping[rows], sharers)
        rows, slots, sharers = self._places
        write(layer, key[rows], value[rows], kv_cache, slots)
        blocks = _whole_blocks(kv_cache, self._blocks)
        for share, ids in zip(self.shares, sharers, strict=True):
            _copy(blocks[share.source].clone(), blocks, ids)
        self.layers += 1

    def _rows(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """The rows of all partial blocks in a step whose row i is written to `slot_mapping[i]`;
        int64, on its device. Where a block begins is looked for on the device, because reading it
        would be to wait. So is whether it is there at all: if not, an error of the device.
        """
        device = slot_mapping.device
        first_slots = [share.source * self._block_size + share.start for share in self.shares]
        is_first = slot_mapping == _on_device(first_slots, device)[:, None]
        torch._assert_async(is_first.any(1).all())
        lengths = torch.tensor([share.stop - share.start for share in self.shares])
        numbers = torch.arange(len(self.shares)).repeat_interleave(lengths)
        offsets = torch.cat([torch.arange(length) for length in lengths.tolist()])
        number, offset = async_tensor_h2d(torch.stack([numbers, offsets]), device)
        rows: torch.Tensor = is_first.int().argmax(1)[number] + offset
        return rows


# The shared blocks of the step that is under way.
_shared_blocks: ContextVar[SharedBlocks | None] = ContextVar("shared_blocks", default=None)


@seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "self scheduler_output intermediate_tensors",
)
def execute_model_v1(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run the step between its copies."""
    return _between_copies(original, self, scheduler_output, *args, **kwargs)


@seam(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile "
    "context_len valid_dummy_state_slots randomize_inputs",
)
def execute_model_v2(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run the step between its copies."""
    return _between_copies(original, self, scheduler_output, *args, **kwargs)


@seam(
    "vllm.model_executor.layers.attention.attention:Attention.__init__",
    "self num_heads head_size scale num_kv_heads alibi_slopes use_alibi_sqrt cache_config "
    "quant_config logits_soft_cap per_layer_sliding_window prefix attn_type "
    "kv_sharing_target_layer_name mm_prefix_clamp_sliding_window attn_backend head_size_v "
    "extra_impl_args",
)
def attention_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """A layer whose backend writes before it attends also copies what a step shares. Whichever
    backend it is: all have the method of that name, and each layer its own instance.
    """
    original(self, *args, **kwargs)
    write = getattr(self.impl, "do_kv_cache_update", None)
    has_own_keys = self.kv_sharing_target_layer_name is None
    if write and has_own_keys and not self.attn_backend.forward_includes_kv_cache_update:
        self.impl.do_kv_cache_update = functools.partial(write_and_share, write)
        setattr(self, COPIES_SHARES, True)


def write_and_share(
    write: Callable[..., None],
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: Any,
    slot_mapping: torch.Tensor,
) -> None:
    """Write one layer's new keys and values, [rows, heads, size], into their slots. Before them
    those of the shared partial blocks, into all blocks that begin with them.
    """
    shared = _shared_blocks.get()
    if shared:
        shared.share(write, layer, key, value, kv_cache, slot_mapping)
    write(layer, key, value, kv_cache, slot_mapping)


def _count(runner: Any, tokens: int) -> None:
    """Count a step of `tokens` computed tokens on the runner."""
    runner.scheduled_tokens = getattr(runner, "scheduled_tokens", 0) + tokens
    if tokens:
        runner.forward_passes = getattr(runner, "forward_passes", 0) + 1


@torch.inference_mode()
def _between_copies(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    _count(runner, scheduler_output.total_num_scheduled_tokens)
    copies = scheduler_output.kv_connector_metadata
    if not isinstance(copies, Copies):
        return original(runner, scheduler_output, *args, **kwargs)
    layers = []
    if copies.loads or copies.saves:  # who shares also saves
        blocks = runner.kv_cache_config.num_blocks
        layers = [_whole_blocks(layer, blocks) for layer in runner.kv_caches]
    # Slot -> its block in every layer.
    slots: dict[int, list[torch.Tensor]] = vars(runner).setdefault("partial_block_slots", {})
    for slot, block_ids in copies.loads.items():
        ids = _on_device(block_ids, layers[0].device)
        for blocks, saved_block in zip(layers, slots[slot], strict=True):
            _copy(saved_block, blocks, ids)
    for share in copies.shares:
        if share.start == share.stop:  # complete before the step
            ids = _on_device(share.blocks, layers[0].device)
            for blocks in layers:
                _copy(blocks[share.source].clone(), blocks, ids)
    with _sharing(copies.shares, runner, len(layers)):
        output = original(runner, scheduler_output, *args, **kwargs)
    for slot, block_id in copies.saves.items():
        slots[slot] = [blocks[block_id].clone() for blocks in layers]
    return output


@contextlib.contextmanager
def _sharing(shares: Sequence[Share], runner: Any, layers: int) -> Iterator[None]:
    """A forward pass in which all `layers` share partial blocks. Raises RuntimeError if not."""
    shared = None
    computed = [share for share in shares if share.start < share.stop]
    if computed:
        blocks = runner.kv_cache_config.num_blocks
        shared = SharedBlocks(computed, runner.cache_config.block_size, blocks)
    token = _shared_blocks.set(shared)
    try:
        yield
    finally:
        _shared_blocks.reset(token)
    if shared and shared.layers != layers:
        raise RuntimeError(
            f"{shared.layers} of {layers} layers have shared the step's partial blocks: "
            "answers would be wrong"
        )


def _whole_blocks(kv_cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """One layer's keys and values by whole blocks: attention kernels may cut a block."""
    whole: torch.Tensor = kv_cache.unflatten(0, (blocks, -1))
    return whole


def _on_device(ids: Sequence[int], device: torch.device) -> torch.Tensor:
    on_device: torch.Tensor = async_tensor_h2d(list(ids), device, torch.long)
    return on_device


def _copy(block: torch.Tensor, blocks: torch.Tensor, ids: torch.Tensor) -> None:
    """Copy a block, no view of `blocks`, to these ids: eight bytes at once are 1.7 times faster."""
    if block.shape[-1] * block.element_size() % torch.int64.itemsize == 0:
        block, blocks = block.view(torch.int64), blocks.view(torch.int64)
    blocks.index_copy_(0, ids, block.expand(len(ids), *block.shape))
