"""Runs of tokens, and their products against the plain definition, token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm_alora.compiler import compiled
from vllm_alora.low_rank import sgmv
from vllm_alora.low_rank.sgmv import (
    LONG,
    LayerAdapters,
    Segment,
    Segments,
    know_layer,
    ranks_of,
    segments_of,
)

pytestmark = pytest.mark.slow

SLOTS, MAX_RANK, INPUTS = 6, 8, 41
OUTPUTS = (160, 67, 8)  # a packed layer: Q, K, V
RANKS = [8, 4, 8, 2, 8, 1]

segments = st.lists(
    st.tuples(st.integers(-1, SLOTS - 1), st.integers(1, 5) | st.integers(LONG - 1, LONG + 2)),
    min_size=1,
    max_size=12,
)


vllm_alora.register()


@pytest.fixture(params=[True, False], ids=["cpp", "pytorch"])
def native(request: pytest.FixtureRequest) -> bool:
    return request.param


def wrapper_for(
    segments: list[tuple[int, int]], native: bool = True, max_batches: int = 16
) -> PunicaWrapperCPU:
    """A wrapper told of (slot, length) segments; -1 is the base, slot i has adapter i + 1."""
    tokens = [slot + 1 for slot, length in segments for _ in range(length)]
    wrapper = PunicaWrapperCPU(12 * (LONG + 2), max_batches=max_batches, device="cpu")
    wrapper.native = native
    mapping = LoRAMapping(tuple(tokens), (0,), is_prefill=True)
    wrapper.update_metadata(mapping, [slot + 1 for slot in range(SLOTS)], SLOTS + 1, 100)
    return wrapper


def know(wrapper: PunicaWrapperCPU, a: Any, b: Any) -> LayerAdapters:
    """Tell the wrapper the ranks of a layer's adapters."""
    layer = know_layer(wrapper, a, b)
    layer.ranks[:] = RANKS
    return layer


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Any,
    b: Any,
    segments: list[tuple[int, int]],
    *,
    native: bool,
    without_weights: int | None = None,
) -> None:
    """Add the products in place; a slot may have weights in the first slice alone."""
    wrapper = wrapper_for(segments, native)
    ranks = know(wrapper, a, b).ranks
    if without_weights is not None:
        ranks[1:, without_weights] = 0
    wrapper.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)


def stacked(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Random A [slots, 1, rank, in], B [slots, 1, out, rank] a slice, zero above a slot's rank."""
    torch.manual_seed(0)
    a = tuple(torch.randn(SLOTS, 1, MAX_RANK, INPUTS) for _ in OUTPUTS)
    b = tuple(torch.randn(SLOTS, 1, out, MAX_RANK) for out in OUTPUTS)
    for slot, rank in enumerate(RANKS):
        for one, other in zip(a, b, strict=True):
            one[slot, :, rank:] = 0
            other[slot, :, :, rank:] = 0
    by_columns = tuple(part.to(dtype).mT.contiguous().mT for part in b)  # as the engine keeps them
    return tuple(part.to(dtype) for part in a), by_columns


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


def test_sharded_adapters_are_refused() -> None:
    """vLLM's own operators compute them, for the base's tokens too."""
    manager = SimpleNamespace(
        punica_wrapper_mapping={"language_model": wrapper_for([(0, 1)])},
        lora_config=SimpleNamespace(fully_sharded_loras=True),
    )
    with pytest.raises(ValueError, match=r"fully_sharded_loras is not served on a CPU.*Leave it"):
        sgmv.create_lora_modules.wrapper(lambda _: pytest.fail("layers were made"), manager)


@settings(max_examples=60, deadline=None)
@given(segments=segments, native=st.booleans())
def test_every_token_has_its_own_adapter(segments: list[tuple[int, int]], native: bool) -> None:
    tokens = sum(length for _, length in segments)
    a, b = stacked(torch.float32)
    x, y = torch.randn(tokens, INPUTS), torch.randn(tokens, sum(OUTPUTS))
    wanted = expected(y, x, a, b, segments)
    add(y, x, a, b, segments, native=native)
    torch.testing.assert_close(y.double(), wanted, atol=2e-4, rtol=1e-5)


def test_in_bfloat16_the_error_is_that_of_rounding_once(native: bool) -> None:
    segments = [(2, 30), (-1, 5), (0, 30), (4, 30), (1, 3), (3, 1), (2, LONG + 1)]
    a, b = stacked(torch.bfloat16)
    x = torch.randn(100 + LONG, INPUTS).bfloat16()
    y = torch.randn(100 + LONG, sum(OUTPUTS)).bfloat16()
    wanted = expected(y, x, a, b, segments)
    add(y, x, a, b, segments, native=native)
    # bfloat16 keeps 8 bits.
    assert (y.double() - wanted).abs().max() < wanted.abs().max() * 2**-7


def test_base_tokens_are_not_touched_at_all(native: bool) -> None:
    a, b = stacked(torch.float32)
    x, y = torch.full((9, INPUTS), torch.nan), torch.randn(9, sum(OUTPUTS))
    before = y.clone()
    x[3:6] = 1.0
    add(y, x, a, b, [(-1, 3), (1, 3), (-1, 3)], native=native)
    of_base = [0, 1, 2, 6, 7, 8]
    assert torch.equal(y[of_base], before[of_base]) and torch.isfinite(y).all()


def test_an_adapter_is_computed_at_its_own_rank_and_only_where_it_has_weights(native: bool) -> None:
    """Neither in a layer nor in a slice that it has not; beside adapters that have them."""
    a, b = stacked(torch.float32)
    # What is never read cannot spoil the result.
    for index, (down, up) in enumerate(zip(a, b, strict=True)):
        from_rank = 0 if index else RANKS[3]
        down[3, :, from_rank:] = up[3, :, :, from_rank:] = torch.nan
    x, y = torch.randn(8, INPUTS), torch.zeros(8, sum(OUTPUTS))
    add(y, x, a, b, [(3, 4), (0, 4)], native=native, without_weights=3)
    assert torch.isfinite(y).all()
    assert y[:4, : OUTPUTS[0]].all() and not y[:4, OUTPUTS[0] :].any()
    assert y[4:].all()


def test_weights_that_vllm_deals_out_to_slices_itself_count_for_all_of_them() -> None:
    """One A for three slices, as of a state-space layer; one A a slice says which have weights."""
    weights = SimpleNamespace(lora_a=torch.zeros(4, INPUTS))
    assert ranks_of(weights, 3) == [4, 4, 4]
    weights.lora_a = [torch.zeros(4, INPUTS), None]
    assert ranks_of(weights, 3) == [4, 4, 4]
    weights.lora_a = [None, torch.zeros(4, INPUTS), torch.zeros(2, INPUTS)]
    assert ranks_of(weights, 3) == [0, 4, 2]
    assert ranks_of(None, 3) == [0, 0, 0]


def test_a_full_batch_of_alora_requests_has_two_segments_each() -> None:
    segments = [part for request in range(16) for part in ((-1, 2), (request % SLOTS, 3))]
    found = wrapper_for(segments, max_batches=16).segments
    assert found.pieces is not None and found.pieces.table[:, 2].sum() == 16 * 3


def test_operands_of_unlike_types_are_refused_and_never_go_to_vllms_operator() -> None:
    a, b = stacked(torch.float32)
    x, y = torch.randn(3, INPUTS).bfloat16(), torch.zeros(3, sum(OUTPUTS)).bfloat16()
    with pytest.raises(ValueError, match="no product of these on a CPU"):
        wrapper_for([(-1, 2), (1, 1)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    wrapper_for([(-1, 3)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    assert not y.any()


def plain(found: Segments) -> list[tuple[int, list[int]]]:
    """Slot and tokens of each segment that PyTorch multiplies."""
    return [(slot, numbers(tokens)) for slot, tokens in found.by_pytorch]


def numbers(places: slice | torch.Tensor) -> list[int]:
    if isinstance(places, slice):
        return list(range(places.start, places.stop))
    return places.tolist()


def test_not_a_number_stays_one_and_large_numbers_stay_large(native: bool) -> None:
    """In bfloat16, which is made of a float32's bits."""
    a, b = stacked(torch.bfloat16)
    x, y = torch.zeros(3, INPUTS).bfloat16(), torch.zeros(3, sum(OUTPUTS)).bfloat16()
    y[:, 0], y[:, 1], y[:, 2], y[:, 3] = torch.nan, torch.inf, 3.3895e38, torch.nan
    before = y.clone()
    add(y, x, a, b, [(0, 3)], native=native)
    torch.testing.assert_close(y, before, rtol=0, atol=0, equal_nan=True)
    x[0], x[1] = torch.nan, torch.inf
    add(y, x, a, b, [(0, 3)], native=native)
    torch.testing.assert_close(y[2], before[2], rtol=0, atol=0, equal_nan=True)
    has_weights = (b[0][0, 0] != 0).any(dim=1)
    assert y[0, : OUTPUTS[0]][has_weights].isnan().all()
    assert not y[1, : OUTPUTS[0]][has_weights].isfinite().any()


def test_in_bfloat16_numbers_are_rounded_to_the_nearest_and_ties_to_even(native: bool) -> None:
    """x A, and the sum in every column, of neighbours in one word and of the last ones."""
    a, b = stacked(torch.bfloat16)
    for down, up in zip(a, b, strict=True):
        down.zero_()
        down[0, 0, 0, :2] = 1
        up[0, 0, :, 0] = 1
    x, y = torch.zeros(4, INPUTS).bfloat16(), torch.ones(4, sum(OUTPUTS)).bfloat16()
    half = 2.0**-8  # of the distance between numbers from 1 on
    x[:, 0] = torch.tensor([half, half, 1.5 * half, 1.5 * half])
    y[1] = 1 + 2 * half
    x[3, 1], y[3] = 1, -1
    add(y, x, a, b, [(0, 4)], native=native)
    rows = [row.unique().tolist() for row in y]
    assert rows == [[1.0], [1 + 4 * half], [1 + 2 * half], [2 * half]]


def test_base_segments_are_nowhere_and_neighbours_are_used_where_they_lie() -> None:
    assert plain(segments_of([-1, 2, -1], [5, 3, 1], native=False)) == [(2, [5, 6, 7])]
    (row,) = segments_of([-1, 2, -1], [5, 3, 1], native=True).pieces.table.tolist()
    assert row == [2, 0, 3]
    assert segments_of([-1], [9], native=True) == (None, [])
    assert segments_of([1, 1], [2, 3], native=False).by_pytorch == [Segment(1, slice(0, 5))]


def test_one_adapter_s_tokens_of_several_requests_are_one_product() -> None:
    slots, lengths = [1, 0, 1, 0], [2, 1, 2, 3]
    together = [(1, [0, 1, 3, 4]), (0, [2, 5, 6, 7])]
    assert plain(segments_of(slots, lengths, native=False)) == together
    pieces = segments_of(slots, lengths, native=True).pieces
    assert pieces.table.tolist() == [[1, 0, 4], [0, 4, 4]]
    assert pieces.tokens.tolist() == [0, 1, 3, 4, 2, 5, 6, 7]


def test_long_segments_are_products_of_pytorch_where_they_lie() -> None:
    slots, lengths = [1, 0, 1, -1, 0], [LONG, 2, LONG + 1, LONG, 1]
    found = segments_of(slots, lengths, native=True)
    long = [Segment(1, slice(0, LONG)), Segment(1, slice(LONG + 2, 2 * LONG + 3))]
    assert found.by_pytorch == long
    assert found.pieces.tokens.tolist() == [LONG, LONG + 1, 3 * LONG + 3]


def test_an_adapter_with_many_short_segments_is_pytorch_s_too() -> None:
    """One rule asked of many conversations: a large product."""
    found = segments_of([0, 1] * 30, [3, 2] * 30, native=True)
    ((slot, tokens),) = found.by_pytorch
    assert slot == 0 and len(tokens) == 90 >= LONG > 60
    assert found.pieces.table.tolist() == [[1, 0, 60]]


def test_a_layer_that_no_adapter_was_placed_in_is_refused(native: bool) -> None:
    """The base would answer for the adapter."""
    a, b = stacked(torch.float32)
    x, y = torch.randn(3, INPUTS), torch.zeros(3, sum(OUTPUTS))
    wrapper = wrapper_for([(1, 3)], native)
    with pytest.raises(ValueError, match="not placed through the plugin"):
        wrapper.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    know(wrapper, a, b)
    with pytest.raises(ValueError, match="not placed through the plugin"):
        wrapper.add_lora_linear(y, x, a, tuple(part.clone() for part in b), 1.0, OUTPUTS)


def test_an_engine_s_adapters_are_multiplied_in_cpp_and_elsewhere_by_pytorch(
    monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, unless the type has no product there, the setting is off or nothing compiles."""
    config = SimpleNamespace(additional_config={})
    monkeypatch.setattr(sgmv, "get_current_vllm_config_or_none", lambda: config)
    assert sgmv.is_native(torch.float32) and sgmv.is_native(torch.bfloat16)
    assert not sgmv.is_native(torch.float16)
    config.additional_config = {sgmv.NATIVE: False}
    assert not sgmv.is_native(torch.float32)
    config.additional_config = {}
    monkeypatch.setenv("CXX", "none")
    compiled.cache_clear()
    assert not sgmv.is_native(torch.float32)
    compiled.cache_clear()
