"""Seams: SGMV on the CPU, one batched matrix product for all adapters that have equally many tokens
instead of a gathered matrix per token.

vLLM's CPU operator copies a whole adapter matrix for every token of the batch
(`lora_weights[indices]`, then einsum), base tokens included, at the largest rank any adapter may
have, in layers too in which none has weights. Here a step's tokens are put together by adapter
once, and adapters of one kind with equally many tokens into groups; each linear layer multiplies
every group at its rank, if it has weights there. What lies side by side is used where it lies. What
does not is copied, a matrix once per step and layer: cheaper than a product of its own for each,
but for long segments, as those of LoRAs are, which are products of their own where they lie. Tokens
of the base cost nothing. LoRA and aLoRA both use it. Can go when vLLM has a segmented CPU operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from .seam import seam

# Tokens from which on a segment is a product of its own: where, on two cores, its copies begin to
# cost more (docs/log/serving.md).
LONG = 64


@dataclass(frozen=True)
class Kind:
    """What adapters must have in common to be one product: the rank, and in which slices of which
    layers they have weights.

    A layer is named by the identity of its tuple of stacked A. None: in all.
    """

    rank: int
    slices: frozenset[tuple[int, int]] | None = None

    def acts_on(self, layer: tuple[torch.Tensor, ...], index: int) -> bool:
        """Whether they have weights in this slice of the layer."""
        return self.slices is None or (id(layer), index) in self.slices


@dataclass(frozen=True)
class SegmentGroup:
    """Adapters of one kind with `length` tokens each: their tokens, adapter by adapter, and their
    slots.
    """

    length: int
    kind: Kind
    tokens: slice | torch.Tensor
    slots: slice | torch.Tensor


def groups(
    slots: Sequence[int], lengths: Sequence[int], kinds: Sequence[Kind]
) -> list[SegmentGroup]:
    """The groups of a batch given as consecutive segments, `lengths[i]` tokens in adapter slot
    `slots[i]`; slot -1 is the base.

    `kinds` are those of the adapters in the slots. A long segment is a group of its own.
    """
    long_segments: list[SegmentGroup] = []
    tokens: dict[int, list[int]] = {}  # slot -> the tokens of its short segments
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot >= 0 and length >= LONG:
            segment = slice(start, start + length)
            long_segments.append(SegmentGroup(length, kinds[slot], segment, slice(slot, slot + 1)))
        elif slot >= 0:
            tokens.setdefault(slot, []).extend(range(start, start + length))
        start += length
    alike: dict[tuple[int, Kind], list[int]] = {}  # tokens each and kind -> slots
    for slot, slot_tokens in tokens.items():
        alike.setdefault((len(slot_tokens), kinds[slot]), []).append(slot)
    groups_of_short = [
        SegmentGroup(length, kind, as_index(_concatenated(tokens, members)), as_index(members))
        for (length, kind), members in alike.items()
    ]
    return long_segments + groups_of_short


def _concatenated(tokens: dict[int, list[int]], slots: Sequence[int]) -> list[int]:
    joined: list[int] = []
    for slot in slots:
        joined += tokens[slot]
    return joined


def as_index(numbers: list[int]) -> slice | torch.Tensor:
    """A slice where the numbers follow one another: a view of what they index."""
    first, stop = numbers[0], numbers[0] + len(numbers)
    if numbers == list(range(first, stop)):
        return slice(first, stop)
    return torch.tensor(numbers)


def _at(tensor: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(index, slice):
        return tensor[index]
    return tensor.index_select(0, index)


def add_low_rank(
    y: torch.Tensor, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: SegmentGroup
) -> None:
    """y += x A B in place on the group's tokens, whose x are `rows`.

    y [all tokens, out], rows [the group's tokens, in], a [slots, in, max_rank], b [slots, max_rank,
    out], all of one type. Accumulates in float32 and rounds x A to y's type, as vLLM's operator
    does; the sum is rounded once, where vLLM rounds the product before.
    """
    rank, slots = group.kind.rank, group.slots
    sums = _at(y, group.tokens)
    if isinstance(slots, slice) and slots.stop == slots.start + 1:  # the same, at half the overhead
        sums.addmm_(rows @ a[slots.start, :, :rank], b[slots.start, :rank])
    else:
        a, b = _at(a.mT[:, :rank], slots).mT, _at(b[:, :rank], slots)
        lanes = (len(a), group.length)
        # Into a part of a packed layer's rows PyTorch would multiply lane after lane, on one core.
        whole = sums.contiguous()
        whole.unflatten(0, lanes).baddbmm_(torch.bmm(rows.unflatten(0, lanes), a), b)
        sums.copy_(whole)
    if not isinstance(group.tokens, slice):
        y.index_copy_(0, group.tokens, sums)


@seam(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.__init__",
    "self max_num_batched_tokens max_batches device kwargs",
)
def init(
    original: Callable[..., None],
    self: Any,
    max_num_batched_tokens: int,
    max_batches: int,
    device: Any,
    **kwargs: Any,
) -> None:
    """Room for two segments per request: with aLoRA a request has a base part and an adapter part.

    vLLM's buffers hold one segment per request, so a full batch raised a shape error. Nothing else
    is sized by `max_batches`.
    """
    original(self, max_num_batched_tokens, 2 * max_batches, device, **kwargs)


@seam("vllm.lora.model_manager:LoRAModelManager._create_lora_modules", "self")
def create_lora_modules(original: Callable[..., None], self: Any) -> None:
    """Keep every B in memory by columns: at a low rank it is read in one piece.

    The shapes are vLLM's. A packed layer's parts are asked for by their shape and their slices
    only. Triton's kernels take it as it is.
    """
    original(self)
    wrappers = self.punica_wrapper_mapping.values()
    if all(isinstance(wrapper, PunicaWrapperCPU) for wrapper in wrappers):
        for module in self.modules.values():
            if isinstance(module, BaseLinearLayerWithLoRA):
                module.lora_b_stacked = tuple(b.mT.contiguous().mT for b in module.lora_b_stacked)


@seam("vllm.lora.model_manager:LoRAModelManager.activate_adapter", "self lora_id")
def activate_adapter(original: Callable[..., bool], self: Any, lora_id: int) -> bool:
    """Tell the Punica wrappers the kind of the adapter in each slot, so that it is computed at its
    own rank, and where it has weights.

    Counts the slots it has filled.
    """
    activated = original(self, lora_id)
    if activated:  # else it had its slot already
        self.swap_ins = getattr(self, "swap_ins", 0) + 1
        kind = _kind(self, self._registered_adapters[lora_id])
        for wrapper in self.punica_wrapper_mapping.values():
            # Equal kinds are one object, so that a step compares them by identity.
            kind = vars(wrapper).setdefault("kinds", {}).setdefault(kind, kind)
            kinds = vars(wrapper).setdefault("slot_kinds", [kind] * self.lora_slots)
            kinds[self.lora_index_to_id.index(lora_id)] = kind
    return activated


def _kind(manager: Any, adapter: Any) -> Kind:
    """From the adapter's weights in the manager's layers.

    A packed layer (QKV, gate and up) has several slices, some without weights. Where the weights
    are not one part a slice, vLLM shares them out itself: then all slices count as having some.
    """
    rank = 0
    slices: set[tuple[int, int]] = set()
    for name, layer in manager.modules.items():
        weights = manager._get_lora_layer_weights(adapter, name)
        if not weights:
            continue
        parts = weights.lora_a
        if not isinstance(parts, list):
            parts = [parts]
        rank = max([rank, *(int(a.shape[-2]) for a in parts if a is not None)])
        stacked = layer.lora_a_stacked
        is_part_a_slice = len(parts) == len(stacked)
        for index in range(len(stacked)):
            if not is_part_a_slice or parts[index] is not None:
                slices.add((id(stacked), index))
    return Kind(rank, frozenset(slices))


@seam(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata",
    "self mapping lora_index_to_id max_loras vocab_size kwargs",
)
def update_metadata(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Put the step's segments into groups, once for all layers.

    On a GPU the wrapper has its own method and is not touched.
    """
    original(self, *args, **kwargs)
    slots, lengths = torch.unique_consecutive(self.token_lora_indices, return_counts=True)
    self.groups = groups(slots.tolist(), lengths.tolist(), getattr(self, "slot_kinds", ()))


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
    """Add every adapter's low-rank product to its tokens of `y`, in place.

    For each slice of a packed layer. Raises ValueError for operands of unlike types and for a
    scale: the original would take them, and give the base's tokens the adapter in the last slot. No
    adapter gets here with another type than its base's (`adapter.check_adapter`).
    """
    if self.groups and (scale != 1.0 or not (x.dtype == y.dtype == lora_a_stacked[0].dtype)):
        operands = f"x {x.dtype}, y {y.dtype}, adapters {lora_a_stacked[0].dtype}, scale {scale}"
        raise ValueError(
            f"vllm_alora: no product of these on a CPU: {operands}. "
            "Serve base and adapters in one dtype"
        )
    weights = _transposed(self, lora_a_stacked, lora_b_stacked)
    slices = list(zip(weights, y.split(output_slices, dim=-1), strict=True))
    for group in self.groups:
        acted_on = [
            weights_and_y
            for index, weights_and_y in enumerate(slices)
            if group.kind.acts_on(lora_a_stacked, index)
        ]
        if not acted_on:
            continue
        rows = _at(x, group.tokens)
        for (a, b), y_slice in acted_on:
            add_low_rank(y_slice, rows, a, b, group)


def _transposed(
    wrapper: Any,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A layer's A and B for each slice, transposed; made once.

    They are views, which cost as much to make as a small product.
    """
    weights: dict[tuple[torch.Tensor, ...], list[tuple[torch.Tensor, torch.Tensor]]]
    weights = vars(wrapper).setdefault("weights", {})
    if lora_a_stacked not in weights:
        weights[lora_a_stacked] = [
            (a[:, 0].mT, b[:, 0].mT) for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
        ]
    return weights[lora_a_stacked]
