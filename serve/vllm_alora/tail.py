"""Seams: what the conversation has beyond whole KV blocks is computed once, not by every rule.

vLLM shares whole blocks. The tokens between the last block boundary and an aLoRA's activation point (the prompt's tail) lie in a block
that also holds the adapter's own tokens, so every adapter computes them again: half a block on average, as much as a short rule.
Here the first request that computes a tail leaves a copy of that block; the others wait for it, get the copy as the start of their
own block, and compute nothing but their rule. What a copy holds behind the tail is overwritten, or masked like any unused slot.

The scheduler's half is a KV connector, vLLM's interface for keys and values from elsewhere. It is put in place by a seam and the copies are
made by seams, because a connector that is configured is one per process and not per engine.
Base requests and plain LoRAs are left alone. Can go when vLLM shares parts of blocks between requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from .activation import ActivatedRequest
from .seam import seam

KEPT_TAILS = "vllm_alora_kept_tails"  # in EngineArgs.additional_config: how many, 0 for none. Each takes the memory of a KV block
DEFAULT_KEPT_TAILS = 128


@dataclass(frozen=True)
class Tail:
    """Tokens `start` up to `end`, the activation point, in block number `block` of a prompt. `key` says which tokens, after which."""

    key: Hashable
    block: int
    start: int
    end: int


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies, by block id: kept tails to blocks before its forward pass, blocks to kept tails after it."""

    loads: dict[int, list[int]] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)


def tail_of(request: Any, block_size: int) -> Tail | None:
    """The request's tail; None if it is no aLoRA's, if the activation point is a block's first token, or without prefix caching."""
    lora = request.lora_request
    if not isinstance(lora, ActivatedRequest) or request.mm_features:
        return None
    block, length = divmod(lora.activation_start, block_size)
    if not length or len(request.block_hashes) < block:
        return None
    start = block * block_size
    before = request.block_hashes[block - 1] if block else request.cache_salt  # a block's hash names all tokens up to its end
    return Tail((before, tuple(request.prompt_token_ids[start : lora.activation_start])), block, start, lora.activation_start)


class SharedTails(KVConnectorBase_V1):
    """Which tails are kept, which request computes one, and what each step copies. One per scheduler."""

    def __init__(self, kv_cache_manager: Any, block_size: int, room: int) -> None:  # not the base class's, which wants a configuration
        self._manager, self._block_size, self._room = kv_cache_manager, block_size, room
        self._kept: OrderedDict[Hashable, int] = OrderedDict()  # tail -> its number, the least recently used first
        self._leaders: dict[Hashable, tuple[Any, Tail]] = {}  # tail -> the request that computes it
        self._loads: dict[int, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens of the tail can be copied; None while another request computes them."""
        tail = tail_of(request, self._block_size)
        if tail is None:
            return 0, False
        leader, _ = self._leaders.get(tail.key, (request, tail))
        if leader.request_id != request.request_id:
            return None, False
        usable = tail.key in self._kept and num_computed_tokens == tail.start  # else the conversation before it was evicted
        return (tail.end - tail.start if usable else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the copy into the request's block, or remember that this request computes the tail."""
        tail = tail_of(request, self._block_size)
        if tail is None:
            return
        if num_external_tokens:
            self._kept.move_to_end(tail.key)
            self._loads.setdefault(self._kept[tail.key], []).append(blocks.get_block_ids()[0][tail.block])
        elif tail.key not in self._kept:
            self._leaders.setdefault(tail.key, (request, tail))

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """The step's copies. A tail that this step completes can be had from the next one on."""
        copies = Copies(loads=self._loads)
        self._loads = {}
        for request, tail in list(self._leaders.values()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            if request.num_computed_tokens + scheduled >= tail.end:
                del self._leaders[tail.key]
                full = len(self._kept) >= self._room
                self._kept[tail.key] = self._kept.popitem(last=False)[1] if full else len(self._kept)
                block_ids = self._manager.get_block_ids(request.request_id)[0]
                copies.saves[block_ids[tail.block]] = self._kept[tail.key]
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """One that is gone computes nothing any more: of those that wait for its tail, the next computes it."""
        self._leaders = {key: leader for key, leader in self._leaders.items() if leader[0].request_id != request.request_id}
        return False, None

    def reset_cache(self) -> bool:
        """Forget all tails."""
        self._kept.clear()
        self._leaders.clear()
        self._loads.clear()
        return True

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Never called: this and the next three are for connectors that copy in the worker themselves."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


@seam(
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry include_finished_set log_stats",
)
def scheduler_init(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """A scheduler that shares tails, if it has no other connector and its blocks are all alike and those of full attention."""
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.additional_config
    room = config.get(KEPT_TAILS, DEFAULT_KEPT_TAILS) if isinstance(config, dict) else DEFAULT_KEPT_TAILS
    specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
    alike = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec) and not self.kv_cache_config.needs_kv_cache_zeroing
    if self.connector is None and alike and room > 0:
        self.connector = SharedTails(self.kv_cache_manager, self.block_size, room)
        self.connector_prefix_cache_stats = PrefixCacheStats() if self.log_stats else None


@seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "self scheduler_output intermediate_tensors",
)
def execute_model_v1(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """The step, between its copies."""
    return _between_copies(original, self, scheduler_output, *args, **kwargs)


@seam(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile context_len valid_dummy_state_slots "
    "randomize_inputs",
)
def execute_model_v2(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """The step, between its copies."""
    return _between_copies(original, self, scheduler_output, *args, **kwargs)


@torch.inference_mode()
def _between_copies(original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    copies = scheduler_output.kv_connector_metadata
    if not isinstance(copies, Copies):
        return original(runner, scheduler_output, *args, **kwargs)
    tails: dict[int, list[torch.Tensor]] = vars(runner).setdefault("tails", {})  # number -> its block in every layer
    for number, block_ids in copies.loads.items():
        for blocks, tail in zip(_blocks(runner), tails[number], strict=True):
            blocks[block_ids] = tail
    output = original(runner, scheduler_output, *args, **kwargs)
    for block_id, number in copies.saves.items():
        tails[number] = [blocks[block_id].clone() for blocks in _blocks(runner)]
    return output


def _blocks(runner: Any) -> list[torch.Tensor]:
    """Every layer's keys and values, [blocks, ...]: attention kernels may cut a block into several smaller ones."""
    return [layer.unflatten(0, (runner.kv_cache_config.num_blocks, -1)) for layer in runner.kv_caches]
