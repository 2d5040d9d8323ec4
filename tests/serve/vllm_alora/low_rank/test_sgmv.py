"""Runs of tokens, and their products against the plain definition, token by token: in C++ and by
PyTorch. On a GPU the kernels' metadata from the host; that their launches are bounded, and give the
same bits: tests/serve/gpu_path/ring_kernels.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_alora
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm.config import CUDAGraphMode
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm_alora.compiler import compiled
from vllm_alora.low_rank import launch_grid, sgmv
from vllm_alora.low_rank.launch_grid import BoundedKernel, prepare_tensors
from vllm_alora.low_rank.native import NativeLayer, pieces_of
from vllm_alora.low_rank.sgmv import LONG, LayerAdapters, know_layer, ranks_of, segments_of
from vllm_alora.seam import SeamError

pytestmark = pytest.mark.slow

SLOTS, MAX_RANK, INPUTS = 6, 8, 41
OUTPUTS = (160, 67, 8)  # a packed layer: Q, K, V
# Of each slot's adapter in each slice, some without weights.
RANKS = np.array([[8, 4, 8, 2, 0, 1], [8, 4, 8, 2, 8, 1], [8, 4, 0, 0, 8, 1]], np.int32)

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
    y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, segments: list[tuple[int, int]], native: bool
) -> None:
    """Add the products in place."""
    wrapper = wrapper_for(segments, native)
    know(wrapper, a, b)
    wrapper.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)


def stacked(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Random A [slots, 1, rank, in], B [slots, 1, out, rank] a slice. What lies above an adapter's
    rank is never read, or it would spoil the result.
    """
    torch.manual_seed(0)
    a = tuple(torch.randn(SLOTS, 1, MAX_RANK, INPUTS).to(dtype) for _ in OUTPUTS)
    b = tuple(torch.randn(SLOTS, 1, MAX_RANK, out).to(dtype).mT for out in OUTPUTS)
    for down, up, ranks in zip(a, b, RANKS, strict=True):
        for slot, rank in enumerate(ranks):
            down[slot, :, rank:] = up[slot, :, :, rank:] = torch.nan
    return a, b


def expected(
    y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, segments: list[tuple[int, int]]
) -> torch.Tensor:
    """Token by token, slice by slice, in float64."""
    wanted = y.double()
    slots = [slot for slot, length in segments for _ in range(length)]
    for token, slot in enumerate(slots):
        slices = zip(a, b, RANKS, wanted[token].split(OUTPUTS), strict=True)
        for down, up, ranks, part in slices:
            rank = ranks[slot]
            if slot >= 0:
                low = down[slot, 0, :rank].double() @ x[token].double()
                part += up[slot, 0, :, :rank].double() @ low
    return wanted


def test_sharded_adapters_are_refused() -> None:
    """vLLM's own operators compute them, for the base's tokens too."""
    manager = SimpleNamespace(
        punica_wrapper_mapping={"language_model": wrapper_for([(0, 1)])},
        lora_config=SimpleNamespace(fully_sharded_loras=True),
    )
    with pytest.raises(ValueError, match=r"fully_sharded_loras is not served on a CPU.*Leave it"):
        sgmv.create_lora_modules.wrapper(lambda _: pytest.fail("layers were made"), manager)


@settings(max_examples=60, deadline=None)
@given(
    segments=segments, native=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_every_token_has_its_own_adapter(
    segments: list[tuple[int, int]], native: bool, dtype: torch.dtype
) -> None:
    """At its rank, where it has weights; the base's tokens have none and are not touched."""
    slots = torch.tensor([slot for slot, length in segments for _ in range(length)])
    a, b = stacked(dtype)
    x, y = (
        torch.randn(len(slots), INPUTS).to(dtype),
        torch.randn(len(slots), sum(OUTPUTS)).to(dtype),
    )
    x[slots < 0] = torch.nan
    before, wanted = y.clone(), expected(y, x, a, b, segments)
    add(y, x, a, b, segments, native)
    noise = 2e-4
    if dtype == torch.bfloat16:  # which keeps 8 bits
        noise = float(wanted.abs().max()) * 2**-7
    torch.testing.assert_close(y.double(), wanted, atol=noise, rtol=1e-5)
    assert torch.equal(y[slots < 0], before[slots < 0])


def test_weights_that_vllm_deals_out_to_slices_itself_count_for_all_of_them() -> None:
    """One A for three slices, as of a state-space layer; one A a slice says which have weights."""
    weights = SimpleNamespace(lora_a=torch.zeros(4, INPUTS))
    assert ranks_of(weights, 3) == [4, 4, 4]
    weights.lora_a = [torch.zeros(4, INPUTS), None]
    assert ranks_of(weights, 3) == [4, 4, 4]
    weights.lora_a = [None, torch.zeros(4, INPUTS), torch.zeros(2, INPUTS)]
    assert ranks_of(weights, 3) == [0, 4, 2]
    assert ranks_of(None, 3) == [0, 0, 0]


def test_operands_of_unlike_types_are_refused_and_never_go_to_vllms_operator() -> None:
    a, b = stacked(torch.float32)
    x, y = torch.randn(3, INPUTS).bfloat16(), torch.zeros(3, sum(OUTPUTS)).bfloat16()
    with pytest.raises(ValueError, match="no product of these on a CPU"):
        wrapper_for([(-1, 2), (1, 1)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    wrapper_for([(-1, 3)]).add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    assert not y.any()


def test_not_a_number_stays_one_and_large_numbers_stay_large(native: bool) -> None:
    """In bfloat16, which is made of a float32's bits."""
    a, b = stacked(torch.bfloat16)
    x, y = torch.zeros(3, INPUTS).bfloat16(), torch.zeros(3, sum(OUTPUTS)).bfloat16()
    y[:, 0], y[:, 1], y[:, 2], y[:, 3] = torch.nan, torch.inf, 3.3895e38, torch.nan
    before = y.clone()
    add(y, x, a, b, [(0, 3)], native)
    torch.testing.assert_close(y, before, rtol=0, atol=0, equal_nan=True)
    x[0], x[1] = torch.nan, torch.inf
    add(y, x, a, b, [(0, 3)], native)
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
    add(y, x, a, b, [(0, 4)], native)
    rows = [row.unique().tolist() for row in y]
    assert rows == [[1.0], [1 + 4 * half], [1 + 2 * half], [2 * half]]


def test_segments_are_put_together_by_adapter_and_long_ones_are_pytorch_s() -> None:
    """And those of an adapter with many short ones: one rule asked of many conversations."""
    found = segments_of([1, 0, 1, -1, 0], [LONG, 2, LONG + 1, LONG, 1], native=True)
    assert found.by_pytorch == [(1, slice(0, LONG)), (1, slice(LONG + 2, 2 * LONG + 3))]
    assert found.pieces.tokens.tolist() == [LONG, LONG + 1, 3 * LONG + 3]
    found = segments_of([0, 1] * 30, [3, 2] * 30, native=True)
    ((slot, tokens),) = found.by_pytorch
    assert slot == 0 and len(tokens) == 90 >= LONG > 60
    assert found.pieces.table.tolist() == [[1, 0, 60]]


def test_weights_and_rows_that_lie_otherwise_or_are_not_the_step_s_are_refused() -> None:
    """They would be read as if they did not, or written beyond their end."""
    a, b = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 16).mT
    ranks = np.full((1, 2), 4, np.int32)
    with pytest.raises(ValueError, match="B by columns"):
        NativeLayer([a], [b.contiguous()], [16], ranks)
    with pytest.raises(ValueError, match="other shapes"):
        NativeLayer([a], [b], [15], ranks)
    layer, pieces = NativeLayer([a], [b], [16], ranks), pieces_of({0: [2]})
    with pytest.raises(ValueError, match="rows must lie"):
        layer.add(torch.zeros(16, 3).mT, torch.zeros(3, 8), pieces)
    layer.add(torch.zeros(3, 16), torch.zeros(3, 8), pieces)
    for rows, width, inputs in ((2, 16, 8), (3, 15, 8), (3, 16, 9)):
        with pytest.raises(ValueError, match="not the rows of the step"):
            layer.add(torch.zeros(rows, width), torch.zeros(rows, inputs), pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_share_the_work_and_bits_are_the_same(
    dtype: torch.dtype, threads: list[int]
) -> None:
    """Whoever computes a piece, and whether or not the next one's weights are fetched meanwhile:
    every sum is of one thread. Slices of unlike widths, adapters of unlike ranks, some of none.
    """
    torch.manual_seed(0)
    slots, widths = 30, [80, 16, 41]
    a = [torch.randn(slots, 1, 4, 73).to(dtype) for _ in widths]
    b = [torch.randn(slots, 1, 4, width).to(dtype).mT for width in widths]
    layer = NativeLayer(a, b, widths, np.random.default_rng(0).integers(0, 5, (3, slots), np.int32))
    pieces = pieces_of({slot: list(range(7 * slot, 7 * slot + 7)) for slot in range(slots)})
    x, start = torch.randn(7 * slots, 73).to(dtype), torch.randn(7 * slots, sum(widths)).to(dtype)
    sums = []
    for count in threads:
        torch.set_num_threads(count)
        sums.append(start.clone())
        layer.add(sums[-1], x, pieces)
    assert not torch.equal(sums[0], start)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


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
    monkeypatch: MonkeyPatch,
) -> None:
    """Unless the type has no product there, or nothing compiles."""
    assert sgmv.is_native(torch.float32) and sgmv.is_native(torch.bfloat16)
    assert not sgmv.is_native(torch.float16)
    monkeypatch.setenv("CXX", "none")
    compiled.cache_clear()
    assert not sgmv.is_native(torch.float32)
    compiled.cache_clear()


TOKENS = 40  # of a step
FIELDS = [field.name for field in dataclasses.fields(LoRAKernelMeta)]


def metadata(slots: list[int], *, from_host: bool, counts: list[int] | None = None) -> Any:
    """The kernels' metadata of a step that comes after another one."""
    meta = LoRAKernelMeta.make(SLOTS, TOKENS, "cpu", counts)
    for tensor in (meta.token_lora_mapping, meta.token_indices_sorted_by_lora_ids):
        tensor.zero_()  # memory that nobody has written yet
    meta.prepare_tensors(torch.tensor([3, 3, 0, -1]))
    if from_host:
        meta.host_slots = np.array(slots, np.int64)
        prepare_tensors.wrapper(pytest.fail, meta, None)
    else:
        meta.prepare_tensors(torch.tensor(slots))
    return meta


@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=TOKENS),
    counts=st.sampled_from([[], [SLOTS + 1], [1, 2, 4, SLOTS + 1], [1, 2]]),
)
def test_kernels_metadata_of_the_host_is_the_device_s(slots: list[int], counts: list[int]) -> None:
    """With the counts of vLLM's default, [slots + 1], too."""
    mine = metadata(slots, from_host=True, counts=counts)
    vllms = metadata(slots, from_host=False, counts=counts)
    for name in FIELDS:
        ours, expected = getattr(mine, name), getattr(vllms, name)
        if isinstance(expected, torch.Tensor):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected), name


def test_a_wrapper_knows_the_largest_graph_of_its_engine(monkeypatch: MonkeyPatch) -> None:
    compilation = SimpleNamespace(max_cudagraph_capture_size=512)
    config = SimpleNamespace(compilation_config=compilation)
    monkeypatch.setattr(launch_grid, "KERNELS", ())
    monkeypatch.setattr(launch_grid, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(launch_grid, "_graphs", launch_grid.Graphs())
    for mode, largest in ((CUDAGraphMode.NONE, 0), (CUDAGraphMode.FULL, 512)):
        compilation.cudagraph_mode = mode
        launch_grid.init.wrapper(lambda *_: None, object())
        assert launch_grid._graphs.largest == largest


def test_a_kernel_with_other_parameters_is_refused() -> None:
    with pytest.raises(SeamError, match="no BLOCK_M"):
        BoundedKernel(SimpleNamespace(arg_names=["x", "M", "lora_ids"]))
