"""Seams: a step's copies of partial blocks (`partial_block.py`), in the worker.

Whole blocks are copied before and after the forward pass. What is shared in it is written as vLLM
writes it, layer by layer: after the step's own keys and values and before anything attends to them,
the partial block's rows once more, into the blocks of those that begin with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..seam import seam
from .partial_block import Copies, Share


class SharedRows:
    """The rows of a step's shared partial blocks, and the slots into which layers write them too.

    int64, [rows of all sharers].
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
            of_each = [self._of_share(share, slot_mapping) for share in self.shares]
            rows, slots = zip(*of_each, strict=True)
            self._rows_and_slots = torch.cat(rows), torch.cat(slots)
        self.layers += 1
        return self._rows_and_slots

    def _of_share(
        self, share: Share, slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inside = torch.arange(share.start, share.stop)
        first = (slot_mapping == share.source * self._block_size + share.start).nonzero()[0, 0]
        slots = torch.tensor(share.blocks)[:, None] * self._block_size + inside
        return (first + inside - share.start).repeat(len(share.blocks)), slots.flatten()


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
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
    "self layer key value kv_cache slot_mapping",
)
def do_kv_cache_update(
    original: Callable[..., None],
    self: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: Any,
    slot_mapping: torch.Tensor,
) -> None:
    """One layer's new keys and values, [rows, heads, size], into their slots.

    Those of the shared partial blocks into all that use them.
    """
    original(self, layer, key, value, kv_cache, slot_mapping)
    shared = _shared_rows.get()
    if shared:
        rows, slots = shared.of(slot_mapping)
        original(self, layer, key[rows], value[rows], kv_cache, slots)


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
            index = torch.tensor(share.blocks)
            for blocks in layers:
                blocks[index] = blocks[share.source].clone()
    with _sharing(copies.shares, runner.cache_config.block_size, len(layers)):
        output = original(runner, scheduler_output, *args, **kwargs)
    for slot, block_id in copies.saves.items():
        slots[slot] = [blocks[block_id].clone() for blocks in layers]
    return output


def _load(
    layers: Sequence[torch.Tensor], slot: Sequence[torch.Tensor], block_ids: list[int]
) -> None:
    """Copy what a slot holds of every layer into these blocks."""
    index = torch.tensor(block_ids).to(layers[0].device, non_blocking=True)
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
