"""Runs of tokens, and their products against the plain definition: every token times its own
adapter's matrices.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm_alora.sgmv import LONG, Kind, SegmentGroup, _kind, groups

pytestmark = pytest.mark.slow

SLOTS, MAX_RANK, INPUTS = 6, 8, 24
OUTPUTS = (16, 8, 8)  # a packed layer: Q, K, V
RANKS = [8, 4, 8, 2, 8, 1]
KINDS = [Kind(rank) for rank in RANKS]

segments = st.lists(
    st.tuples(st.integers(-1, SLOTS - 1), st.integers(1, 5) | st.integers(LONG - 1, LONG + 2)),
    min_size=1,
    max_size=12,
)


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()


def wrapper_for(segments: list[tuple[int, int]], max_batches: int = 16) -> PunicaWrapperCPU:
    """A wrapper told about a batch of (slot, length) segments; slot -1 is the base; the adapter id
    of slot i is i + 1.
    """
    tokens = [slot + 1 for slot, length in segments for _ in range(length)]
    wrapper = PunicaWrapperCPU(12 * (LONG + 2), max_batches=max_batches, device="cpu")
    wrapper.slot_kinds = KINDS
    wrapper.update_metadata(
        LoRAMapping(tuple(tokens), (0,), is_prefill=True),
        [slot + 1 for slot in range(SLOTS)],
        SLOTS + 1,
        100,
    )
    return wrapper


def stacked(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Random A [slots, 1, rank, in] and B [slots, 1, out, rank] per slice, zero above each slot's
    rank as vLLM leaves them.
    """
    torch.manual_seed(0)
    a = tuple(torch.randn(SLOTS, 1, MAX_RANK, INPUTS) for _ in OUTPUTS)
    b = tuple(torch.randn(SLOTS, 1, out, MAX_RANK) for out in OUTPUTS)
    for slot, rank in enumerate(RANKS):
        for one, other in zip(a, b, strict=True):
            one[slot, :, rank:] = 0
            other[slot, :, :, rank:] = 0
    return tuple(part.to(dtype) for part in a), tuple(part.to(dtype) for part in b)


def expected(
    y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, segments: list[tuple[int, int]]
) -> torch.Tensor:
    """Token by token, slice by slice, in float64."""
    slots = [slot for slot, length in segments for _ in range(length)]
    rows = []
    for token, slot in enumerate(slots):
        deltas = [
            other[slot, 0].double() @ (one[slot, 0].double() @ x[token].double())
            for one, other in zip(a, b, strict=True)
        ]
        rows.append(y[token].double() + (torch.cat(deltas) if slot >= 0 else 0))
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(segments=segments)
def test_every_token_is_multiplied_with_its_own_adapter(segments: list[tuple[int, int]]) -> None:
    tokens = sum(length for _, length in segments)
    a, b = stacked(torch.float32)
    b = tuple(part.mT.contiguous().mT for part in b)  # as the engine keeps them
    x, y = torch.randn(tokens, INPUTS), torch.randn(tokens, sum(OUTPUTS))
    wanted = expected(y, x, a, b, segments)
    wrapper_for(segments).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    torch.testing.assert_close(y.double(), wanted, atol=2e-4, rtol=1e-5)


def test_in_bfloat16_the_error_is_that_of_rounding_once() -> None:
    segments = [
        (2, 30),
        (-1, 5),
        (0, 30),
        (4, 30),
        (1, 3),
        (3, 1),
        (2, LONG + 1),
    ]  # three are one product
    a, b = stacked(torch.bfloat16)
    b = tuple(part.mT.contiguous().mT for part in b)  # as the engine keeps them
    x, y = (
        torch.randn(100 + LONG, INPUTS).bfloat16(),
        torch.randn(100 + LONG, sum(OUTPUTS)).bfloat16(),
    )
    wanted = expected(y, x, a, b, segments)
    wrapper_for(segments).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    largest = wanted.abs().max()
    assert (y.double() - wanted).abs().max() < largest * 2**-7  # bfloat16 keeps 8 bits


def test_base_tokens_are_not_touched_at_all() -> None:
    a, b = stacked(torch.float32)
    x, y = torch.full((9, INPUTS), torch.nan), torch.randn(9, sum(OUTPUTS))
    before = y.clone()
    x[3:6] = 1.0
    wrapper_for([(-1, 3), (1, 3), (-1, 3)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    assert (
        torch.equal(y[:3], before[:3])
        and torch.equal(y[6:], before[6:])
        and torch.isfinite(y).all()
    )


def test_an_adapter_is_computed_at_its_own_rank() -> None:
    a, b = stacked(torch.float32)
    for one, other in zip(a, b, strict=True):
        one[3, :, RANKS[3] :] = other[3, :, :, RANKS[3] :] = (
            torch.nan
        )  # what is never read cannot spoil the result
    x, y = torch.randn(4, INPUTS), torch.zeros(4, sum(OUTPUTS))
    wrapper_for([(3, 4)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    assert torch.isfinite(y).all() and y.abs().max() > 0


def test_where_an_adapter_has_no_weights_nothing_is_computed() -> None:
    """Neither in a layer that it has not, nor in a slice of one; beside adapters that have them
    all.
    """
    a, b = stacked(torch.float32)
    for index in (1, 2):
        a[index][3] = b[index][3] = torch.nan  # what is never read cannot spoil the result
    x, y = torch.randn(8, INPUTS), torch.zeros(8, sum(OUTPUTS))
    wrapper = wrapper_for([(3, 4), (0, 4)])
    wrapper.slot_kinds = [*KINDS[:3], Kind(RANKS[3], frozenset({(id(a), 0)})), *KINDS[4:]]
    wrapper.update_metadata(
        LoRAMapping((4,) * 4 + (1,) * 4, (0,), is_prefill=True),
        [slot + 1 for slot in range(SLOTS)],
        SLOTS + 1,
        100,
    )
    wrapper.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    assert y[:4, : OUTPUTS[0]].all() and not y[:4, OUTPUTS[0] :].any()
    assert y[4:].all()
    other = tuple(part.clone() for part in a)
    before = y.clone()
    wrapper.add_lora_linear(y, x, other, b, 1.0, OUTPUTS)
    assert torch.equal(y[:4], before[:4]) and not torch.equal(y[4:], before[4:])


def test_weights_that_vllm_deals_out_to_slices_itself_count_for_all_of_them() -> None:
    """One A for a layer of three slices, as of a state-space layer's input; one A a slice says
    which have weights.
    """
    layer = SimpleNamespace(lora_a_stacked=stacked(torch.float32)[0])
    weights = SimpleNamespace(lora_a=torch.zeros(4, INPUTS))
    manager = SimpleNamespace(
        modules={"in_proj": layer}, _get_lora_layer_weights=lambda adapter, name: weights
    )
    assert _kind(manager, None) == Kind(
        4, frozenset((id(layer.lora_a_stacked), index) for index in range(3))
    )
    weights.lora_a = [torch.zeros(4, INPUTS), None]
    assert _kind(manager, None) == Kind(
        4, frozenset((id(layer.lora_a_stacked), index) for index in range(3))
    )
    weights.lora_a = [None, torch.zeros(4, INPUTS), None]
    assert _kind(manager, None) == Kind(4, frozenset({(id(layer.lora_a_stacked), 1)}))


def test_a_full_batch_of_alora_requests_has_two_segments_each() -> None:
    segments = [part for request in range(16) for part in ((-1, 2), (request % SLOTS, 3))]
    found = wrapper_for(segments, max_batches=16).groups
    assert sum(group.length * len(torch.arange(SLOTS)[group.slots]) for group in found) == 16 * 3


def test_operands_of_unlike_types_are_refused_and_never_go_to_vllms_operator() -> None:
    a, b = stacked(torch.float32)
    x, y = torch.randn(3, INPUTS).bfloat16(), torch.zeros(3, sum(OUTPUTS)).bfloat16()
    with pytest.raises(ValueError, match="no product of these on a CPU"):
        wrapper_for([(-1, 2), (1, 1)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    wrapper_for([(-1, 3)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    assert not y.any()


def plain(found: list[SegmentGroup]) -> list[tuple[int, int, list[int], list[int]]]:
    """Length, rank, tokens and slots of each group."""
    return [
        (group.length, group.kind.rank, numbers(group.tokens), numbers(group.slots))
        for group in found
    ]


def numbers(places: slice | torch.Tensor) -> list[int]:
    return list(range(places.start, places.stop)) if isinstance(places, slice) else places.tolist()


def test_base_segments_are_in_no_group() -> None:
    assert plain(groups([-1, 2, -1], [5, 3, 1], [Kind(8)] * 3)) == [(3, 8, [5, 6, 7], [2])]


def test_equal_segments_with_neighbouring_adapters_are_used_where_they_lie() -> None:
    assert groups([0, 1, 2], [25, 25, 25], [Kind(8)] * 3) == [
        SegmentGroup(25, Kind(8), slice(0, 75), slice(0, 3))
    ]


def test_neither_the_order_of_the_adapters_nor_what_is_between_them_parts_a_group() -> None:
    assert plain(groups([4, -1, 1, 2], [2, 3, 2, 2], [Kind(8)] * 5)) == [
        (2, 8, [0, 1, 5, 6, 7, 8], [4, 1, 2])
    ]


def test_one_adapter_s_tokens_of_several_requests_are_one_product() -> None:
    assert plain(groups([1, 0, 1, 0], [2, 1, 2, 3], [Kind(8)] * 2)) == [
        (4, 8, [0, 1, 3, 4, 2, 5, 6, 7], [1, 0])
    ]


def test_long_segments_are_products_of_their_own_where_they_lie() -> None:
    found = groups([1, 0, 1, -1, 0], [LONG, 2, LONG + 1, LONG, 1], [Kind(8)] * 2)
    long = [(LONG, slice(0, LONG)), (LONG + 1, slice(LONG + 2, 2 * LONG + 3))]
    assert found[:2] == [
        SegmentGroup(length, Kind(8), tokens, slice(1, 2)) for length, tokens in long
    ]
    assert plain(found[2:]) == [(3, 8, [LONG, LONG + 1, 3 * LONG + 3], [0])]


def test_other_lengths_and_other_ranks_are_groups_of_their_own() -> None:
    assert [
        (group.length, group.kind.rank)
        for group in groups([0, 1, 2, 3], [3, 2, 3, 3], [Kind(rank) for rank in (8, 8, 4, 8)])
    ] == [
        (3, 8),
        (2, 8),
        (3, 4),
    ]
