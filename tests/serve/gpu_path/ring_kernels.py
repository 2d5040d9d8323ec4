"""Mapping, wrapper and vLLM's own low-rank kernels against a loop over tokens, and how many
programs they take; its kernel that writes keys and values, with what a step shares. On a GPU, or
interpreted on a CPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm_alora import register
from vllm_alora.kv.partial_block import Copies, Share
from vllm_alora.kv.partial_block_copies import execute_model_v2, write_and_share
from vllm_alora.low_rank import launch_grid

from guard.machine.device import installed_device

DEVICE = "cpu" if installed_device() == "cpu" else "cuda"
IN, OUT, RANK, SLOTS, TOKENS = 96, (80, 48), 8, 6, 160


def half(*shape: int) -> torch.Tensor:
    """Random float16 where the kernels run."""
    return torch.randn(*shape).half().to(DEVICE)


@pytest.fixture(scope="module")
def wrapper() -> Any:
    register()
    config = SimpleNamespace(
        max_loras=SLOTS, specialize_active_lora=False, fully_sharded_loras=False
    )
    return PunicaWrapperGPU(TOKENS, 16, DEVICE, lora_config=config, max_num_seqs=16)


@pytest.fixture
def weights() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """A [slots, 1, rank, in] and B [slots, 1, out, rank] of two packed slices, float16."""
    torch.manual_seed(0)
    a = tuple(half(SLOTS, 1, RANK, IN) * 0.1 for _ in OUT)
    b = tuple(half(SLOTS, 1, out, RANK) * 0.1 for out in OUT)
    return a, b


@pytest.fixture
def grids() -> Iterator[list[tuple[int, ...]]]:
    """The grids that kernels are launched over from now on."""
    seen: list[tuple[int, ...]] = []

    class Counting:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            seen.append(grid)
            return self.kernel[grid]

    bounded = [getattr(module, name) for module, name in launch_grid.KERNELS]
    plain = [each.kernel for each in bounded]
    for each in bounded:
        each.kernel = Counting(each.kernel)
    yield seen
    for each, kernel in zip(bounded, plain, strict=True):
        each.kernel = kernel


def step_of(seed: int, adapters: int) -> list[int]:
    """The adapter id of each token: a conversation of nobody's, then short suffixes."""
    rng = random.Random(seed)
    tokens = [0] * rng.randrange(TOKENS // 2)
    for adapter in rng.sample(range(1, SLOTS + 1), adapters):
        tokens += [0] * rng.randrange(4) + [adapter] * rng.randrange(1, 12)
    return tokens[:TOKENS]


def update(wrapper: Any, tokens: list[int]) -> None:
    """As a worker does before a step; adapter N is in slot SLOTS - N."""
    slots: list[int | None] = [SLOTS - slot for slot in range(SLOTS)]
    mapping = LoRAMapping(tuple(tokens), tuple(tokens[-1:]), is_prefill=True)
    wrapper.update_metadata(mapping, slots, SLOTS, 1000)


def product(wrapper: Any, weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y with the low-rank products of the step's adapters added."""
    out = y.clone()
    wrapper.add_lora_linear(out, x, *weights, 1.0, OUT)
    return out


def loop(weights: Any, tokens: list[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same, token by token in float32."""
    out = y.float()
    for row, adapter in enumerate(tokens):
        start = 0
        for a, b in zip(*weights, strict=True):
            width = b.shape[2]
            if adapter:
                slot = SLOTS - adapter
                out[row, start : start + width] += b[slot, 0].float() @ (
                    a[slot, 0].float() @ x[row].float()
                )
            start += width
    return out


@pytest.mark.parametrize(("seed", "adapters"), [(0, 1), (1, 3), (2, SLOTS), (3, 2)])
def test_the_kernels_add_what_a_loop_adds_and_bounded_launches_do_it_with_fewer_programs(
    wrapper: Any,
    weights: Any,
    grids: list[tuple[int, ...]],
    monkeypatch: MonkeyPatch,
    seed: int,
    adapters: int,
) -> None:
    """And leave the base's tokens as they are."""
    tokens = step_of(seed, adapters)
    torch.manual_seed(seed)
    x, y = half(len(tokens), IN), half(len(tokens), sum(OUT))
    update(wrapper, tokens)
    bounded = product(wrapper, weights, x, y)
    torch.testing.assert_close(bounded.float(), loop(weights, tokens, x, y), atol=4e-3, rtol=4e-3)
    of_base = torch.tensor(tokens, device=DEVICE) == 0
    assert torch.equal(bounded[of_base], y[of_base])
    few = sum(map(math.prod, grids))
    grids.clear()
    # As large as a graph that is captured: vLLM's own grid.
    monkeypatch.setattr(launch_grid._graphs, "largest", len(tokens))
    assert torch.equal(product(wrapper, weights, x, y), bounded)
    assert few < sum(map(math.prod, grids))


def test_no_adapters_no_launch(wrapper: Any, weights: Any, grids: list[tuple[int, ...]]) -> None:
    update(wrapper, [1] * 20)
    update(wrapper, [0] * 20)
    x, y = half(20, IN), half(20, sum(OUT))
    assert torch.equal(product(wrapper, weights, x, y), y)
    assert grids == []


def test_vllms_kernel_writes_a_shared_partial_block_into_all(monkeypatch: MonkeyPatch) -> None:
    """Keys and values of a step's nine tokens, five of which two other blocks begin with."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    heads, size, block = 2, 16, 16
    backend = TritonAttentionImpl(
        num_heads=heads,
        head_size=size,
        scale=1.0,
        num_kv_heads=heads,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
    one = torch.tensor(1.0, device=DEVICE)
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    cache = torch.zeros(6, heads, block, 2 * size, device=DEVICE).half()

    def forward(*_: Any) -> None:
        rows = [*range(3, 5), *range(block, block + 5), 4 * block + 5, -1]
        slots = torch.tensor(rows, device=DEVICE)
        key, value = half(2, 9, heads, size)
        write_and_share(backend.do_kv_cache_update, layer, key, value, cache, slots)

    runner = SimpleNamespace(
        kv_caches=[cache],
        kv_cache_config=SimpleNamespace(num_blocks=6),
        cache_config=SimpleNamespace(block_size=block),
    )
    copies = Copies(saves={0: 1}, shares=[Share(1, 0, 5, (4, 5))])
    step = SimpleNamespace(kv_connector_metadata=copies, total_num_scheduled_tokens=8)
    execute_model_v2.wrapper(forward, runner, step)
    assert bool(cache[1, :, :5].all())  # none is zero
    assert torch.equal(cache[[4, 5], :, :5], cache[[1, 1], :, :5])
    assert bool(cache[4, :, 5].all()) and not cache[4, :, 6:].any()  # its own, and nothing else
    assert not cache[5, :, 5:].any() and not cache[2:4].any()
