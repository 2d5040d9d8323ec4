"""Seams: SGMV on the CPU, one small matrix product per run of tokens instead of one gathered matrix per token.

vLLM's CPU operator copies a whole adapter matrix for every token of the batch (`lora_weights[indices]`, then einsum), base
tokens included, at the largest rank any adapter may have. Here a step's tokens are cut into runs once; each linear layer then
multiplies every run in place with its adapter at that adapter's rank. Tokens of the base cost nothing. LoRA and aLoRA both use it.
Can go when vLLM has a segmented CPU operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from .seam import seam


@dataclass(frozen=True)
class Run:
    """`lanes` segments of `length` tokens each, back to back from token `start`, with the adapters in slots `slot`, `slot + 1`, …

    A single segment is a run of one lane. Segments of equal length with neighbouring adapters (decoding, equal suffixes)
    are one batched product over views: nothing is copied or padded.
    """

    start: int
    length: int
    slot: int
    lanes: int = 1

    @property
    def stop(self) -> int:
        """The token after the last one."""
        return self.start + self.length * self.lanes

    @property
    def slots(self) -> slice:
        """The adapters' slots, one per lane."""
        return slice(self.slot, self.slot + self.lanes)


def runs(slots: Sequence[int], lengths: Sequence[int]) -> list[Run]:
    """The runs of a batch given as consecutive segments, `lengths[i]` tokens in adapter slot `slots[i]`; slot -1 is the base."""
    found: list[Run] = []
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        last = found[-1] if found else None
        if slot >= 0 and last and last.stop == start and last.length == length and last.slot + last.lanes == slot:
            found[-1] = Run(last.start, length, last.slot, last.lanes + 1)
        elif slot >= 0:
            found.append(Run(start, length, slot))
        start += length
    return found


def add_low_rank(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, run: Run, rank: int) -> None:
    """y += x A^T B^T in place on the run's tokens. y [tokens, out], x [tokens, in], a [slots, max_rank, in], b [slots, out, max_rank].

    All of one type; like vLLM's operator, it accumulates in float32 and rounds x A^T to y's type once.
    """
    if run.lanes == 1:  # the same, at half the overhead
        y[run.start : run.stop].addmm_(x[run.start : run.stop] @ a[run.slot, :rank].T, b[run.slot, :, :rank].T)
        return
    lanes = (run.lanes, run.length)
    low_rank = torch.bmm(x[run.start : run.stop].unflatten(0, lanes), a[run.slots, :rank].mT)
    y[run.start : run.stop].unflatten(0, lanes).baddbmm_(low_rank, b[run.slots, :, :rank].mT)


@seam(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.__init__",
    "self max_num_batched_tokens max_batches device kwargs",
)
def init(original: Callable[..., None], self: Any, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
    """Room for two segments per request: with aLoRA a request has a base part and an adapter part.

    vLLM's buffers hold one segment per request, so a full batch raised a shape error. Nothing else is sized by `max_batches`.
    """
    original(self, max_num_batched_tokens, 2 * max_batches, device, **kwargs)


@seam("vllm.lora.model_manager:LoRAModelManager._create_lora_modules", "self")
def create_lora_modules(original: Callable[..., None], self: Any) -> None:
    """Keep every B in memory by columns, so that a low rank is read in one piece and the product is the plain one of rows by rows.

    The shapes are vLLM's. A packed layer's parts are asked for by their shape and their slices only.
    """
    original(self)
    if self.device.type == "cpu":
        for module in self.modules.values():
            if isinstance(module, BaseLinearLayerWithLoRA):
                module.lora_b_stacked = tuple(b.mT.contiguous().mT for b in module.lora_b_stacked)


@seam("vllm.lora.model_manager:LoRAModelManager.activate_adapter", "self lora_id")
def activate_adapter(original: Callable[..., bool], self: Any, lora_id: int) -> bool:
    """Tell the Punica wrappers the rank of the adapter in each slot, so that a small one is not computed at the maximum.

    Counts the slots it has filled.
    """
    activated = original(self, lora_id)
    if activated:  # else it had its slot already
        self.slots_filled = getattr(self, "slots_filled", 0) + 1
        rank = max(_rank(lora) for lora in self._registered_adapters[lora_id].loras.values())
        for wrapper in self.punica_wrapper_mapping.values():
            ranks = vars(wrapper).setdefault("slot_ranks", [0] * self.lora_slots)
            ranks[self.lora_index_to_id.index(lora_id)] = rank
    return activated


def _rank(lora: Any) -> int:
    """The largest rank in one layer's weights; a packed layer (QKV, gate and up) has several."""
    parts = lora.lora_a if isinstance(lora.lora_a, list) else [lora.lora_a]
    return max(int(part.shape[-2]) for part in parts if part is not None)


@seam(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata",
    "self mapping lora_index_to_id max_loras vocab_size kwargs",
)
def update_metadata(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Cut the step's tokens into runs, once for all layers. (On a GPU the wrapper has its own method and is not touched.)"""
    original(self, *args, **kwargs)
    slots, lengths = torch.unique_consecutive(self.token_lora_indices, return_counts=True)
    self.runs = runs(slots.tolist(), lengths.tolist())


@seam(
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
    "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs",
)
def add_lora_linear(
    original: Callable[..., None],
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **kwargs: Any,
) -> None:
    """Add every adapter's low-rank product to its tokens of `y`, in place, for each slice of a packed layer.

    Raises ValueError for operands of unlike types and for a scale: the original would take them, and give the base's tokens the
    adapter in the last slot. No adapter gets here with another type than its base's (`adapter.check_adapter`).
    """
    if self.runs and (scale != 1.0 or not (x.dtype == y.dtype == lora_a_stacked[0].dtype)):
        operands = f"x {x.dtype}, y {y.dtype}, adapters {lora_a_stacked[0].dtype}, scale {scale}"
        raise ValueError(f"vllm_alora: no product of these on a CPU: {operands}")
    for a, b, part in zip(lora_a_stacked, lora_b_stacked, y.split(output_slices, dim=-1), strict=True):
        for run in self.runs:
            add_low_rank(part, x, a[:, 0], b[:, 0], run, rank=max(self.slot_ranks[run.slots]))
