"""Which engines share partial blocks, and in which steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_alora.kv.allocation import GIVES_HELD_BLOCKS
from vllm_alora.kv.partial_block import COPIES_SHARES, SharedPartialBlocks
from vllm_alora.kv.partial_block_seams import (
    KEPT_PARTIAL_BLOCKS,
    _may_share,
    in_step_above,
    init_kv_output_aggregator,
    scheduler_init,
)

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


def configs(**changed: Any) -> tuple[Any, Any]:
    """vLLM's configurations of an engine that may share, but for what is `changed`."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
    fine = {"lora": object(), "runner": "generate", "caching": True, "speculative": None}
    fine |= {"specs": [spec], "zeroing": False} | changed
    engine = SimpleNamespace(
        lora_config=fine["lora"],
        model_config=SimpleNamespace(runner_type=fine["runner"]),
        cache_config=SimpleNamespace(enable_prefix_caching=fine["caching"]),
        speculative_config=fine["speculative"],
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in fine["specs"]]
    return engine, SimpleNamespace(kv_cache_groups=groups, needs_kv_cache_zeroing=fine["zeroing"])


def test_engines_in_which_a_partial_block_is_of_no_use_or_not_safe_share_none() -> None:
    assert _may_share(*configs())
    for name, value in (
        ("lora", None),
        ("runner", "pooling"),
        ("caching", False),
        ("speculative", object()),
        ("specs", []),
        ("specs", [object()]),
        ("zeroing", True),
    ):
        assert not _may_share(*configs(**{name: value})), name


class ToyLayer(AttentionLayerBase):
    """An attention layer, of a backend that writes shared rows or of another."""

    get_attn_backend = get_kv_cache_spec = None  # not asked for

    def __init__(self, *, copies_shares: bool) -> None:
        setattr(self, COPIES_SHARES, copies_shares)


GRAPH_TOKENS = 512  # of the largest captured graph


def gpu_config(**changed: Any) -> Any:
    """vLLM's configuration, in the process of the worker, but for what is `changed`."""
    plain = [ToyLayer(copies_shares=True), object()]  # the latter of another kind
    fine = {"layers": plain, "fused": None, "ubatching": False, "contexts": 1}
    fine |= {"graphs": CUDAGraphMode.FULL_AND_PIECEWISE} | changed
    passes = SimpleNamespace(fuse_rope_kvcache=fine["fused"], fuse_qk_norm_rope_kvcache=False)
    compilation = SimpleNamespace(
        static_forward_context=dict(enumerate(fine["layers"])),
        pass_config=passes,
        cudagraph_mode=fine["graphs"],
        max_cudagraph_capture_size=GRAPH_TOKENS,
    )
    parallel = SimpleNamespace(
        use_ubatching=fine["ubatching"],
        decode_context_parallel_size=fine["contexts"],
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
    changed: dict[str, Any], monkeypatch: MonkeyPatch
) -> None:
    assert in_step_above(gpu_config(**changed)) == 0  # a CPU has one backend, and no graphs
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert in_step_above(gpu_config()) == GRAPH_TOKENS
    assert in_step_above(gpu_config(graphs=CUDAGraphMode.NONE)) == 0
    assert in_step_above(gpu_config(**changed)) is None


def test_all_layers_of_a_real_engine_copy_shares(served: Served, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert in_step_above(served.core.vllm_config) == 0


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
