"""Three ways to compute a batch's low-rank products: our code, vLLM's, and a loop over adapters.

Knows nothing of times or tolerances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from serve.bench.sgmv.batches import SgmvBatch
from serve.bench.sgmv.layers import Layer
from serve.bench.sgmv.report import LOOP, OURS, VLLMS

if TYPE_CHECKING:
    import torch

    Operator = Callable[[torch.Tensor, torch.Tensor, Layer], None]


def operators(batch: SgmvBatch, max_batches: int = 1024) -> dict[str, Operator]:
    """The three ways to compute a batch."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm_alora.low_rank.sgmv import know_layer

    wrapper = _wrapper(batch, max_batches)
    stock = PunicaWrapperCPU.add_lora_linear.__wrapped__  # type: ignore[attr-defined]
    rows_of_slot = _rows_of_slots(batch)

    prepared: set[int] = set()

    def ours(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        if id(layer) not in prepared:  # happens in the comparison, before anything is timed
            know_layer(wrapper, layer.a, layer.b).ranks[:] = batch.ranks
            prepared.add(id(layer))
        wrapper.add_lora_linear(y, x, layer.a, layer.b, 1.0, layer.slices)

    def loop(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        for a, b, part in zip(layer.a, layer.b, y.split(layer.slices, dim=-1), strict=True):
            for slot, rows in rows_of_slot.items():
                rank = batch.ranks[slot]
                down, up = a[slot, 0, :rank].T, b[slot, 0, :, :rank].T
                if isinstance(rows, slice):
                    part[rows].addmm_(x[rows] @ down, up)
                else:
                    part.index_add_(0, rows, x.index_select(0, rows) @ down @ up)

    def vllms(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        stock(wrapper, y, x, layer.a, layer.b_by_rows, 1.0, layer.slices)

    return {OURS: ours, LOOP: loop, VLLMS: vllms}


def _wrapper(batch: SgmvBatch, max_batches: int) -> Any:
    """vLLM's entry to the products, patched by the plugin, with slots for the batch's tokens."""
    import torch
    import vllm_alora
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm_alora.low_rank.sgmv import is_native

    vllm_alora.register()
    slots = len(batch.ranks)
    wrapper: Any = PunicaWrapperCPU(batch.tokens, max_batches=max_batches, device="cpu")
    wrapper.native = is_native(torch.float32)
    mapping = LoRAMapping(tuple(slot + 1 for slot in batch.slot_of_token), (0,), is_prefill=True)
    wrapper.update_metadata(mapping, [slot + 1 for slot in range(slots)], slots + 1, 100)
    return wrapper


def _rows_of_slots(batch: SgmvBatch) -> dict[int, slice | torch.Tensor]:
    """The tokens of each adapter: a slice where they are consecutive, as in a fan-out."""
    import torch

    tokens_of_slot: dict[int, list[int]] = {}
    for token, slot in enumerate(batch.slot_of_token):
        tokens_of_slot.setdefault(slot, []).append(token)
    rows: dict[int, slice | torch.Tensor] = {}
    for slot, tokens in tokens_of_slot.items():
        if tokens[-1] - tokens[0] + 1 == len(tokens):
            rows[slot] = slice(tokens[0], tokens[-1] + 1)
        else:
            rows[slot] = torch.tensor(tokens)
    return rows
