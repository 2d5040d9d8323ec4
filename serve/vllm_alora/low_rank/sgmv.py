"""Seams: SGMV on the CPU, every adapter's low-rank product where its weights lie.

vLLM's CPU operator copies a whole adapter matrix for every token, base tokens included, at the
largest rank any adapter may have. Here a step's tokens are put together by adapter once, and each
linear layer multiplies each adapter's at its own rank, if it has weights there. Short segments, as
of aLoRAs, are one call in C++ (`native.py`); long ones, float16, and all without a compiler are
products of PyTorch's. Tokens of the base cost nothing. Remove when vLLM has a segmented CPU
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from ..compiler import CompileError
from ..seam import seam
from .native import FUNCTIONS, NativeLayer, Pieces, load, pieces_of

# Tokens from which on an adapter has a product of PyTorch's own: larger ones are faster there than
# in C++ (docs/lessons.md).
LONG = 64

logger = init_logger(f"vllm.{__name__}")

Stacked = tuple[torch.Tensor, ...]  # a layer's A, or B, of all slots, for each slice


class Segment(NamedTuple):
    """Tokens of one slot's adapter."""

    slot: int
    tokens: slice | torch.Tensor


class Segments(NamedTuple):
    """A step's tokens by adapter: those of one call in C++, and those that PyTorch multiplies."""

    pieces: Pieces | None
    by_pytorch: list[Segment]


def segments_of(slots: Sequence[int], lengths: Sequence[int], native: bool) -> Segments:
    """The tokens by adapter of a batch of consecutive segments, `lengths[i]` tokens in adapter slot
    `slots[i]`; -1 is the base. `native`: the short ones are for C++.
    """
    by_pytorch: list[Segment] = []
    short: dict[int, list[int]] = {}  # slot -> the tokens of its short segments
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot >= 0 and length >= LONG:
            by_pytorch.append(Segment(slot, slice(start, start + length)))
        elif slot >= 0:
            short.setdefault(slot, []).extend(range(start, start + length))
        start += length
    in_cpp: dict[int, list[int]] = {}
    for slot, tokens in short.items():
        if native and len(tokens) < LONG:
            in_cpp[slot] = tokens
        else:
            by_pytorch.append(Segment(slot, as_index(tokens)))
    if not in_cpp:
        return Segments(None, by_pytorch)
    return Segments(pieces_of(in_cpp), by_pytorch)


def as_index(numbers: list[int]) -> slice | torch.Tensor:
    """A slice where the numbers follow one another: a view of what they index."""
    first, stop = numbers[0], numbers[0] + len(numbers)
    if numbers == list(range(first, stop)):
        return slice(first, stop)
    return torch.tensor(numbers)


class LayerAdapters:
    """A linear layer's adapters by slot: `ranks` [slices, slots], 0 where there are no weights."""

    def __init__(self, a: Stacked, b: Stacked) -> None:
        self.ranks = np.zeros((len(a), len(a[0])), np.int32)
        # Views cost as much to make as a small product.
        self._weights = [
            (slice_a[:, 0].mT, slice_b[:, 0].mT) for slice_a, slice_b in zip(a, b, strict=True)
        ]
        self.a, self.b = a, b
        self._native: NativeLayer | None = None

    def add(self, y: torch.Tensor, x: torch.Tensor, outputs: Sequence[int], step: Segments) -> None:
        """Add every adapter's product to its tokens of `y`, in place."""
        for segment in step.by_pytorch:
            self._add_segment(y, x, outputs, segment)
        if step.pieces:
            if self._native is None:
                self._native = NativeLayer(self.a, self.b, outputs, self.ranks)
            self._native.add(y, x, step.pieces)

    def _add_segment(
        self, y: torch.Tensor, x: torch.Tensor, outputs: Sequence[int], segment: Segment
    ) -> None:
        """Add one segment's product, by PyTorch. It accumulates in float32 and rounds x A to y's
        type, as vLLM's operator does; the sum is rounded once, where vLLM rounds the product
        before.
        """
        slot, tokens = segment
        rows = _at(x, tokens)
        slices = zip(self._weights, y.split(list(outputs), dim=-1), strict=True)
        for index, ((a, b), part) in enumerate(slices):
            rank = self.ranks[index, slot]
            if not rank:
                continue
            sums = _at(part, tokens).addmm_(rows @ a[slot, :, :rank], b[slot, :rank])
            if not isinstance(tokens, slice):
                part.index_copy_(0, tokens, sums)


def _at(tensor: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(index, slice):
        return tensor[index]
    return tensor.index_select(0, index)


def know_layer(wrapper: Any, a: Stacked, b: Stacked) -> LayerAdapters:
    """The layer with these weights, known to the Punica wrapper from then on."""
    layers: dict[int, LayerAdapters] = wrapper.low_rank_layers
    if id(a) not in layers:
        layers[id(a)] = LayerAdapters(a, b)  # which keeps them, so that the identity stays theirs
    return layers[id(a)]


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
    self.low_rank_layers = {}  # by the identity of their tuple of A
    self.native = False


@seam("vllm.lora.model_manager:LoRAModelManager._create_lora_modules", "self")
def create_lora_modules(original: Callable[..., None], self: Any) -> None:
    """Keep every B in memory by columns, which a low rank is read by, and compile the products in
    C++. Raises ValueError for fully sharded adapters on a CPU, which vLLM would compute itself.
    """
    wrappers = list(self.punica_wrapper_mapping.values())
    is_on_cpu = all(isinstance(wrapper, PunicaWrapperCPU) for wrapper in wrappers)
    if is_on_cpu and self.lora_config.fully_sharded_loras:
        raise ValueError(
            "vllm_alora: fully_sharded_loras is not served on a CPU: vLLM's operators would give "
            "base tokens the adapter in the last slot. Leave it out"
        )
    original(self)
    if not is_on_cpu:
        return
    for module in self.modules.values():
        if isinstance(module, BaseLinearLayerWithLoRA):
            module.lora_b_stacked = tuple(b.mT.contiguous().mT for b in module.lora_b_stacked)
    native = is_native(self.lora_config.lora_dtype)
    for wrapper in wrappers:
        wrapper.native = native


def is_native(dtype: torch.dtype) -> bool:
    """Whether products of this type are computed in C++."""
    if dtype not in FUNCTIONS:
        return False
    try:
        load()
    except CompileError as error:
        logger.warning_once(
            "vllm_alora: low-rank products are PyTorch's, slower for many short suffixes: %s",
            str(error),
        )
        return False
    return True


@seam("vllm.lora.model_manager:LoRAModelManager.activate_adapter", "self lora_id")
def activate_adapter(original: Callable[..., bool], self: Any, lora_id: int) -> bool:
    """Tell the layers the ranks of the adapter in each slot, so that it is computed at its own
    rank, and where it has weights. Counts the slots it has filled.
    """
    activated = original(self, lora_id)
    if activated:  # else it had its slot already
        self.swap_ins = getattr(self, "swap_ins", 0) + 1
        slot = self.lora_index_to_id.index(lora_id)
        wrappers = self.punica_wrapper_mapping.values()
        if all(isinstance(wrapper, PunicaWrapperCPU) for wrapper in wrappers):
            adapter = self._registered_adapters[lora_id]
            for name, module in self.modules.items():
                if isinstance(module, BaseLinearLayerWithLoRA):
                    weights = self._get_lora_layer_weights(adapter, name)
                    a, b = module.lora_a_stacked, module.lora_b_stacked
                    layer = know_layer(module.punica_wrapper, a, b)
                    layer.ranks[:, slot] = ranks_of(weights, len(a))
    return activated


def ranks_of(weights: Any, slices: int) -> list[int]:
    """The ranks of an adapter's weights in a layer (None or vLLM's), one for each slice of outputs.
    A packed layer (QKV, gate and up) has several slices, some without weights. Where the weights
    are not one part a slice, vLLM shares them out itself: then all slices count as having some.
    """
    if not weights:
        return [0] * slices
    parts = weights.lora_a
    if not isinstance(parts, list):
        parts = [parts]
    ranks = [0 if part is None else int(part.shape[-2]) for part in parts]
    if len(ranks) != slices:
        return [max(ranks)] * slices
    return ranks


@seam("vllm.lora.layers.utils:_get_lora_device", "base_layer")
def get_lora_device(original: Callable[[Any], Any], base_layer: Any) -> Any:
    """Where a layer's adapters lie: beside its scales where oneDNN has packed its weight away."""
    if getattr(base_layer, "weight", base_layer) is None:
        return base_layer.weight_scale.device
    return original(base_layer)


@seam(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata",
    "self mapping lora_index_to_id max_loras vocab_size kwargs",
)
def update_metadata(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Put the step's tokens together by adapter, once for all layers of a CPU."""
    original(self, *args, **kwargs)
    slots, lengths = torch.unique_consecutive(self.token_lora_indices, return_counts=True)
    self.segments = segments_of(slots.tolist(), lengths.tolist(), self.native)


@seam(
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
    "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs",
)
def add_lora_linear(
    original: Callable[..., None],
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Stacked,
    lora_b_stacked: Stacked,
    scale: float,
    output_slices: tuple[int, ...],
    **kwargs: Any,
) -> None:
    """Add every adapter's product to its tokens of `y`, in place. Raises ValueError for operands of
    unlike types, for a scale and for a layer without placed adapters: the original would take them,
    and give the base's tokens the adapter in the last slot.
    """
    step: Segments = self.segments
    if not step.pieces and not step.by_pytorch:
        return
    if scale != 1.0 or not (x.dtype == y.dtype == lora_a_stacked[0].dtype):
        operands = f"x {x.dtype}, y {y.dtype}, adapters {lora_a_stacked[0].dtype}, scale {scale}"
        raise ValueError(
            f"vllm_alora: no product of these on a CPU: {operands}. "
            "Serve base and adapters in one dtype"
        )
    layer = self.low_rank_layers.get(id(lora_a_stacked))
    if layer is None or layer.b is not lora_b_stacked:  # else the base would answer for them
        raise ValueError("vllm_alora: a layer whose adapters were not placed through the plugin")
    layer.add(y, x, output_slices, step)
