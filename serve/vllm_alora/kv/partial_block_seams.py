"""Seams: an engine's scheduler shares partial blocks, where that is safe (`partial_block.py`).

The connector is put in place here and not configured, because a connector that is configured is one
per process and not per engine. Remove when vLLM shares parts of blocks between requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from ..seam import seam, setting
from .partial_block import COPIES_SHARES, SharedPartialBlocks

# In EngineArgs.additional_config: how many partial blocks are kept, 0 for none. Each takes the
# memory of a KV block.
KEPT_PARTIAL_BLOCKS = "vllm_alora_kept_partial_blocks"
DEFAULT_KEPT = 32


@seam(
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
    "mm_registry include_finished_set log_stats",
)
def scheduler_init(
    original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """A scheduler that shares partial blocks, where nothing stands in the way (`_may_share`)."""
    original(self, vllm_config, *args, **kwargs)
    room = setting(vllm_config, KEPT_PARTIAL_BLOCKS, DEFAULT_KEPT)
    if room > 0 and self.connector is None and _may_share(vllm_config, self.kv_cache_config):
        above = in_step_above(vllm_config)
        self.connector = SharedPartialBlocks(
            self.kv_cache_manager, self.block_size, room, in_step_above=above
        )
        self.connector_prefix_cache_stats = None
        if self.log_stats:
            self.connector_prefix_cache_stats = PrefixCacheStats()


def in_step_above(vllm_config: Any) -> int | None:
    """The tokens that a step must exceed to be surely none of a captured graph's, 0 where nothing
    is captured. None where layers do not write what is shared in a step (`partial_block_copies`),
    or are in another process.
    """
    if current_platform.is_cpu():
        return 0
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    layers = [
        layer
        for layer in compilation.static_forward_context.values()
        if isinstance(layer, AttentionLayerBase)
    ]
    passes = compilation.pass_config
    is_written_elsewhere = passes.fuse_rope_kvcache or passes.fuse_qk_norm_rope_kvcache
    is_step_cut = (
        parallel.use_ubatching
        or parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1
    )
    if not layers or is_written_elsewhere or is_step_cut:
        return None
    if not all(getattr(layer, COPIES_SHARES, False) for layer in layers):
        return None
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return 0
    largest_graph: int | None = compilation.max_cudagraph_capture_size
    return largest_graph


def _may_share(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether the engine generates with adapters and caches plain blocks that stay as they are."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return (
        vllm_config.lora_config is not None
        and vllm_config.model_config.runner_type == "generate"
        and vllm_config.cache_config.enable_prefix_caching
        and vllm_config.speculative_config is None
        and len(specs) == 1
        # Not a subclass: those keep more in a block than keys and values.
        and type(specs[0]) is FullAttentionSpec
        and not kv_cache_config.needs_kv_cache_zeroing
    )


@seam(
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
    "self reset_running_requests reset_connector",
)
def reset_prefix_cache(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
    """Forget partial blocks with the blocks, whether or not the caller knows of a connector. The
    base may have other weights now. Where vLLM keeps its blocks, as requests are running, ours are
    kept too.
    """
    is_done = original(self, *args, **kwargs)
    if is_done and isinstance(self.connector, SharedPartialBlocks):
        self.connector.reset_cache()
    return is_done


@seam("vllm.v1.executor.abstract:Executor.init_kv_output_aggregator", "self connector")
def init_kv_output_aggregator(original: Callable[..., None], self: Any, connector: Any) -> None:
    if not isinstance(connector, SharedPartialBlocks):
        original(self, connector)
