"""Which engines share partial blocks, in which steps, and how a step copies them, on tensors that
stand for a runner's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_alora.kv import partial_block_copies as copying
from vllm_alora.kv.allocation import GIVES_HELD_BLOCKS
from vllm_alora.kv.partial_block import COPIES_SHARES, Copies, Share, SharedPartialBlocks
from vllm_alora.kv.partial_block_seams import (
    KEPT_PARTIAL_BLOCKS,
    _may_share,
    in_step_above,
    init_kv_output_aggregator,
    scheduler_init,
)
from vllm_alora.seam import Seam

from tests.serve.served import BLOCK, Served

pytestmark = pytest.mark.slow


def test_workers_outputs_are_not_gathered_for_partial_blocks() -> None:
    asked: list[object] = []
    shared = SharedPartialBlocks(None, BLOCK, 2, in_step_above=None)
    for connector in (shared, object()):
        init_kv_output_aggregator.wrapper(
            lambda _, connector: asked.append(connector), None, connector
        )
    assert len(asked) == 1 and not isinstance(asked[0], SharedPartialBlocks)


PLAIN = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)


def configs(
    *,
    lora: object = "adapters",
    runner: str = "generate",
    caching: bool = True,
    speculative: object = None,
    specs: Sequence[object] = (PLAIN,),
    zeroing: bool = False,
) -> tuple[Any, Any]:
    """vLLM's configurations of an engine; by default of one that may share."""
    engine = SimpleNamespace(
        lora_config=lora,
        model_config=SimpleNamespace(runner_type=runner),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        speculative_config=speculative,
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return engine, SimpleNamespace(kv_cache_groups=groups, needs_kv_cache_zeroing=zeroing)


def test_engines_in_which_a_partial_block_is_of_no_use_or_not_safe_share_none() -> None:
    assert _may_share(*configs())
    assert not _may_share(*configs(lora=None))
    assert not _may_share(*configs(runner="pooling"))
    assert not _may_share(*configs(caching=False))
    assert not _may_share(*configs(speculative=object()))
    assert not _may_share(*configs(specs=[]))
    assert not _may_share(*configs(specs=[object()]))
    assert not _may_share(*configs(zeroing=True))


class ToyLayer(AttentionLayerBase):
    """An attention layer, of a backend that writes shared rows or of another."""

    get_attn_backend = get_kv_cache_spec = None  # not asked for

    def __init__(self, *, copies_shares: bool) -> None:
        setattr(self, COPIES_SHARES, copies_shares)


GRAPH_TOKENS = 512  # of the largest captured graph


def gpu_config(
    *,
    layers: Sequence[object] = (ToyLayer(copies_shares=True), object()),  # the latter attends not
    fused: bool = False,
    ubatching: bool = False,
    contexts: int = 1,
    graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
) -> Any:
    """vLLM's configuration, in the process of the worker; by default of one that may share."""
    compilation = SimpleNamespace(
        static_forward_context=dict(enumerate(layers)),
        pass_config=SimpleNamespace(fuse_rope_kvcache=fused, fuse_qk_norm_rope_kvcache=False),
        cudagraph_mode=graphs,
        max_cudagraph_capture_size=GRAPH_TOKENS,
    )
    parallel = SimpleNamespace(
        use_ubatching=ubatching,
        decode_context_parallel_size=contexts,
        prefill_context_parallel_size=1,
    )
    return SimpleNamespace(compilation_config=compilation, parallel_config=parallel)


@pytest.mark.parametrize(
    "changed",
    [
        {"layers": []},  # of workers in other processes nothing is known
        {"layers": [ToyLayer(copies_shares=True), ToyLayer(copies_shares=False)]},
        {"fused": True},
        {"ubatching": True},
        {"contexts": 2},
    ],
)
def test_on_a_gpu_steps_share_that_are_larger_than_every_graph_if_every_layer_copies_it(
    changed: dict[str, Any], served: Served, monkeypatch: MonkeyPatch
) -> None:
    assert in_step_above(gpu_config(**changed)) == 0  # a CPU has one backend, and no graphs
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert in_step_above(served.core.vllm_config) == 0  # all layers of a real engine copy it
    assert in_step_above(gpu_config()) == GRAPH_TOKENS
    assert in_step_above(gpu_config(graphs=CUDAGraphMode.NONE)) == 0
    assert in_step_above(gpu_config(**changed)) is None


@pytest.mark.parametrize("kept", [0, 5])
def test_an_engine_that_is_to_keep_none_has_no_connector(kept: int) -> None:
    config, kv_cache_config = configs()
    config.additional_config = {KEPT_PARTIAL_BLOCKS: kept, GIVES_HELD_BLOCKS: False}
    scheduler: Any = SimpleNamespace(
        connector=None,
        kv_cache_config=kv_cache_config,
        kv_cache_manager=SimpleNamespace(),
        block_size=BLOCK,
        log_stats=False,
    )
    scheduler_init.wrapper(lambda *_: None, scheduler, config)
    assert (scheduler.connector is None) == (kept == 0)
    assert scheduler.kv_cache_manager.gives_held_blocks is False


HEADS, SIZE = 2, 8


def runner_of(layers: list[torch.Tensor], blocks: int = 6) -> Any:
    return SimpleNamespace(
        kv_caches=layers,
        kv_cache_config=SimpleNamespace(num_blocks=blocks),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )


def step_of(copies: Copies | None) -> Any:
    return SimpleNamespace(kv_connector_metadata=copies, total_num_scheduled_tokens=7)


@pytest.mark.parametrize("execute", [copying.execute_model_v1, copying.execute_model_v2])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_runner_copies_whole_blocks_before_and_after_its_step(execute: Seam, pieces: int) -> None:
    layers = [torch.randn(6 * pieces, 2, BLOCK // pieces, 8) for _ in range(2)]
    before = [layer.clone().unflatten(0, (6, pieces)) for layer in layers]
    runner = runner_of(layers)

    def fill(*_: Any) -> None:
        for layer in layers:
            layer.unflatten(0, (6, pieces))[2].fill_(5)

    execute.wrapper(lambda *_: None, runner, step_of(Copies(saves={0: 1})))
    execute.wrapper(fill, runner, step_of(Copies(loads={0: [3, 4]}, saves={0: 2})))
    for copies in (None, Copies(loads={0: [5]})):
        execute.wrapper(lambda *_: None, runner, step_of(copies))
    for layer, old in zip(layers, before, strict=True):
        now = layer.unflatten(0, (6, pieces))
        assert torch.equal(now[[0, 1, 3, 4]], old[[0, 1, 1, 1]]) and bool((now[[2, 5]] == 5).all())


def write(layer: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """What a backend does with [rows, heads, size]; a layer is [blocks, heads, slots, size]."""

    def plain(_layer: Any, key: Any, _value: Any, cache: torch.Tensor, slot_mapping: Any) -> None:
        size = cache.shape[2]
        for row, slot in zip(key, slot_mapping.tolist(), strict=True):
            cache[slot // size, :, slot % size] = row

    copying.write_and_share(plain, None, rows, rows, layer, slots)


def execute(
    layers: list[torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    copies: Copies,
    runner: Any = None,
) -> None:
    """A step that writes these rows in these layers; all are the runner's, but for a test's own."""

    def forward(*_: Any) -> None:
        for layer in layers:
            write(layer, rows, slots)

    runner = runner or runner_of(layers)
    copying.execute_model_v1.wrapper(forward, runner, step_of(copies))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, SIZE), (torch.bfloat16, SIZE), (torch.bfloat16, 6)]
)
def test_each_layer_copies_a_shared_tail_into_all_its_blocks(dtype: torch.dtype, size: int) -> None:
    """Three partial blocks: of the step, with four tokens computed before, complete before."""
    layers = [torch.randn(8, HEADS, BLOCK, size).to(dtype) for _ in range(2)]
    old = [layer.clone() for layer in layers]
    of_first = range(BLOCK, BLOCK + 12)
    of_second = range(2 * BLOCK + 4, 2 * BLOCK + 9)
    slots = torch.tensor([*of_first, *of_second, 3 * BLOCK + 9])  # the last is a sharer's own
    rows = torch.randn(len(slots), HEADS, size).to(dtype)
    shares = [Share(1, 0, 12, (4, 5)), Share(2, 4, 9, (3,)), Share(6, 7, 7, (7,))]
    copies = Copies(saves={0: 1, 1: 2}, shares=shares)
    execute(layers, rows, slots, copies, runner_of(layers, blocks=8))
    for layer, before in zip(layers, old, strict=True):
        assert torch.equal(layer[1, :, :12], rows[:12].transpose(0, 1))
        assert torch.equal(layer[[4, 5], :, :12], layer[[1, 1], :, :12])
        assert torch.equal(layer[3, :, :4], before[2, :, :4])
        assert torch.equal(layer[3, :, 4:9], rows[12:17].transpose(0, 1))
        assert torch.equal(layer[3, :, 9], rows[17])
        assert torch.equal(layer[7, :, :7], before[6, :, :7])
        assert torch.equal(layer[[0, 6]], before[[0, 6]])


def test_blocks_that_a_kernel_cuts_are_copied_whole() -> None:
    """Each is two of the kernel's."""
    layer = torch.randn(12, HEADS, BLOCK // 2, SIZE)
    before = layer.clone()
    rows, slots = torch.randn(20, HEADS, SIZE), torch.arange(BLOCK, BLOCK + 20)
    execute([layer], rows, slots, Copies(saves={0: 1}, shares=[Share(1, 0, 20, (4,))]))
    assert torch.equal(layer[8], rows[:16].transpose(0, 1))
    assert torch.equal(layer[9, :, :4], rows[16:].transpose(0, 1))
    untouched = [0, 1, 4, 5, 6, 7, 10, 11]
    assert torch.equal(layer[untouched], before[untouched])


def test_a_layer_that_shares_nothing_and_a_step_without_the_shared_tokens_are_errors() -> None:
    layers = [torch.randn(6, HEADS, BLOCK, SIZE) for _ in range(2)]
    rows, slots = torch.randn(5, HEADS, SIZE), torch.arange(BLOCK, BLOCK + 5)
    copies = Copies(saves={0: 1}, shares=[Share(1, 0, 5, (4,))])
    with pytest.raises(RuntimeError, match="1 of 2 layers"):
        execute(layers[:1], rows, slots, copies, runner_of(layers))
    write(layers[1], rows, slots)  # and what it left behind reaches no other step
    assert copying._shared_blocks.get() is None
    with pytest.raises(RuntimeError, match="nonzero"):
        execute(layers[:1], rows, slots + 1, copies)


@pytest.mark.parametrize(
    ("attends_and_writes", "target", "is_wrapped"),
    [(False, None, True), (True, None, False), (False, "another layer", False)],
)
def test_a_layer_shares_if_its_backend_writes_keys_of_its_own_before_it_attends(
    attends_and_writes: bool, target: str | None, is_wrapped: bool
) -> None:
    written: list[tuple[Any, ...]] = []
    layer = SimpleNamespace(
        kv_sharing_target_layer_name=target,
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=attends_and_writes),
        impl=SimpleNamespace(do_kv_cache_update=lambda *args: written.append(args)),
    )
    copying.attention_init.wrapper(lambda *_, **__: None, layer, 2, head_size=8)
    assert getattr(layer, COPIES_SHARES, False) == is_wrapped
    layer.impl.do_kv_cache_update(layer, "key", "value", "cache", "slots")
    assert written == [(layer, "key", "value", "cache", "slots")]
