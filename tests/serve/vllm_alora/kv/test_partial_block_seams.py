"""Which engines share partial blocks, in which steps, and how a step copies them, on tensors that
stand for a runner's cache.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm_alora.kv import partial_block_copies as copying
from vllm_alora.kv.partial_block import COPIES_SHARES, Copies, Share
from vllm_alora.kv.partial_block_seams import (
    KEPT_PARTIAL_BLOCKS,
    _may_share,
    in_step_above,
    scheduler_init,
)
from vllm_alora.seam import Seam

from tests.serve.served import BLOCK, Served

pytestmark = pytest.mark.slow


def patch_at(monkeypatch: MonkeyPatch, holder: Any, path: str, value: object) -> None:
    """Set an attribute of attributes."""
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    monkeypatch.setattr(holder, name, value)


OF_ANOTHER_KIND = SimpleNamespace(kv_cache_spec=object())


def test_engines_in_which_a_partial_block_is_of_no_use_or_not_safe_share_none(
    served: Served, monkeypatch: MonkeyPatch
) -> None:
    config, cache_config = served.core.vllm_config, served.scheduler.kv_cache_config
    assert _may_share(config, cache_config)
    for holder, path, value in (
        (config, "lora_config", None),
        (config, "model_config.runner_type", "pooling"),
        (config, "cache_config.enable_prefix_caching", False),
        (config, "speculative_config", object()),
        (cache_config, "kv_cache_groups", []),
        (cache_config, "kv_cache_groups", [OF_ANOTHER_KIND]),
        (type(cache_config), "needs_kv_cache_zeroing", True),
    ):
        with monkeypatch.context() as patch:
            patch_at(patch, holder, path, value)
            assert not _may_share(config, cache_config), path


class OtherLayer(AttentionLayerBase):
    """An attention layer of a backend that does not write shared rows."""

    get_attn_backend = get_kv_cache_spec = None  # not asked for


def test_on_a_gpu_steps_share_that_are_larger_than_every_graph_if_every_layer_copies_it(
    served: Served, monkeypatch: MonkeyPatch
) -> None:
    config = served.core.vllm_config
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert in_step_above(config) == 0  # all layers of a real engine copy it, without graphs
    graphs, largest = CUDAGraphMode.FULL_AND_PIECEWISE, 512
    patch_at(monkeypatch, config, "compilation_config.cudagraph_mode", graphs)
    patch_at(monkeypatch, config, "compilation_config.max_cudagraph_capture_size", largest)
    assert in_step_above(config) == largest
    layers = config.compilation_config.static_forward_context
    for path, value in (
        # Of workers in other processes nothing is known.
        ("compilation_config.static_forward_context", {}),
        ("compilation_config.static_forward_context", layers | {"other": OtherLayer()}),
        ("compilation_config.pass_config.fuse_rope_kvcache", True),
        ("parallel_config.enable_dbo", True),
        ("parallel_config.decode_context_parallel_size", 2),
    ):
        with monkeypatch.context() as patch:
            patch_at(patch, config, path, value)
            assert in_step_above(config) is None, path
    monkeypatch.undo()
    assert in_step_above(config) == 0  # a CPU has one backend, and no graphs


@pytest.mark.parametrize("kept", [0, 5])
def test_an_engine_that_is_to_keep_none_has_no_connector(
    served: Served, monkeypatch: MonkeyPatch, kept: int
) -> None:
    config = served.core.vllm_config
    monkeypatch.setattr(config, "additional_config", {KEPT_PARTIAL_BLOCKS: kept})
    scheduler: Any = SimpleNamespace(
        connector=None,
        kv_cache_config=served.scheduler.kv_cache_config,
        kv_cache_manager=SimpleNamespace(),
        block_size=BLOCK,
        log_stats=False,
    )
    scheduler_init.wrapper(lambda *_: None, scheduler, config)
    assert (scheduler.connector is None) == (kept == 0)


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
    layers: list[torch.Tensor], rows: torch.Tensor, slots: torch.Tensor, copies: Copies, runner: Any
) -> None:
    """A step of the runner that writes these rows in these of its layers."""

    def forward(*_: Any) -> None:
        for layer in layers:
            write(layer, rows, slots)

    copying.execute_model_v1.wrapper(forward, runner, step_of(copies))


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, SIZE), (torch.bfloat16, SIZE), (torch.bfloat16, 6)]
)
def test_a_shared_tail_is_copied_into_blocks_whole_or_cut_by_a_kernel(
    dtype: torch.dtype, size: int, pieces: int
) -> None:
    """20 tokens, of which four were computed before the step."""
    layer = torch.randn(6 * pieces, HEADS, BLOCK // pieces, size).to(dtype)
    before = layer.clone()
    rows, slots = torch.randn(17, HEADS, size).to(dtype), torch.arange(BLOCK + 4, BLOCK + 21)
    copies = Copies(saves={0: 1}, shares=[Share(1, 4, 20, (4,))])
    execute([layer], rows, slots, copies, runner_of([layer]))
    now, old = (
        part.unflatten(0, (6, pieces)).transpose(1, 2).flatten(2, 3) for part in (layer, before)
    )
    assert torch.equal(now[4, :, :4], old[1, :, :4])
    assert torch.equal(now[4, :, 4:20], rows[:16].transpose(0, 1))
    assert torch.equal(now[1, :, 4:21], rows.transpose(0, 1))
    assert torch.equal(now[[0, 2, 3, 5]], old[[0, 2, 3, 5]])


def test_a_layer_that_shares_nothing_and_a_step_without_the_shared_tokens_are_errors() -> None:
    layers = [torch.randn(6, HEADS, BLOCK, SIZE) for _ in range(2)]
    rows, slots = torch.randn(5, HEADS, SIZE), torch.arange(BLOCK, BLOCK + 5)
    copies = Copies(saves={0: 1}, shares=[Share(1, 0, 5, (4,))])
    with pytest.raises(RuntimeError, match="1 of 2 layers"):
        execute(layers[:1], rows, slots, copies, runner_of(layers))
    write(layers[1], rows, slots)  # and what it left behind reaches no other step
    assert copying._shared_blocks.get() is None
    with pytest.raises(RuntimeError, match="nonzero"):
        execute(layers[:1], rows, slots + 1, copies, runner_of(layers[:1]))


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
