"""Seams: what the conversation has beyond whole KV blocks is computed once, not by every rule, and not again when it goes on.

vLLM shares whole blocks. The tokens between the last block boundary and an aLoRA's activation point (the prompt's tail) lie in a block
that also holds the adapter's own tokens, so every adapter computes them again: half a block on average, as much as a short rule.
Here the first request that computes a tail leaves a copy of that block; the others wait for it, get the copy as the start of their
own block, and compute nothing but their rule. A conversation that has grown gets the copy too, as far as it begins with the same
tokens. What a copy holds behind those is overwritten, or masked like any unused slot.

The scheduler's half is a KV connector, vLLM's interface for keys and values from elsewhere. It is put in place by a seam and the copies are
made by seams, because a connector that is configured is one per process and not per engine.
Base requests and plain LoRAs are left alone. Can go when vLLM shares parts of blocks between requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from .activation import ActivatedRequest
from .prefetch import Prefetch
from .seam import seam

KEPT_TAILS = "vllm_alora_kept_tails"  # in EngineArgs.additional_config: how many, 0 for none. Each takes the memory of a KV block
DEFAULT_KEPT_TAILS = 32


class Tail(NamedTuple):
    """`tokens` that do not fill a block, up to an activation point. `before` names all tokens before them."""

    before: Hashable
    tokens: tuple[int, ...]


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies: before its forward pass slots into blocks (slot -> block ids), after it blocks into slots (slot -> block id)."""

    loads: dict[int, list[int]] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)


def tail_of(request: Any, block_size: int) -> Tail | None:
    """The request's tail; None if it is no aLoRA's or the activation point is a block's first token."""
    start = _end(request) // block_size * block_size
    return _tokens_at(request, start, block_size) if start < _end(request) else None


def _tokens_at(request: Any, start: int, block_size: int) -> Tail:
    """The base's tokens from a block boundary on, at most a block."""
    before = request.block_hashes[start // block_size - 1] if start else request.cache_salt  # a block's hash names all tokens up to its end
    return Tail(before, tuple(request.prompt_token_ids[start : min(start + block_size, _end(request))]))


def _end(request: Any) -> int:
    """Where the tokens end that all adapters have in common; 0 if there are none."""
    lora = request.lora_request
    return lora.activation_start if isinstance(lora, ActivatedRequest) and not request.mm_features else 0


class SharedTails(KVConnectorBase_V1):
    """Which tails are kept in which slots, which request computes one, and what each step copies. One per scheduler."""

    def __init__(self, kv_cache_manager: Any, block_size: int, room: int) -> None:  # not the base class's, which wants a configuration
        self._manager, self._block_size, self._room = kv_cache_manager, block_size, room
        self._kept: OrderedDict[Tail, int] = OrderedDict()  # tail -> its slot, the least recently used first
        self._leaders: dict[Tail, Any] = {}  # tail -> the request that computes it
        self._found: dict[str, tuple[Tail, int]] = {}  # request id -> the tail it begins with, and the number of its block
        self._loads: dict[int, list[int]] = {}
        self.prefetch: Prefetch | None = None  # reads the adapters of waiting requests, if anybody does

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind those in the prefix cache can be copied; None while another request computes the tail.

        None as well while the request's adapter is read from disk.
        """
        if request.lora_request is not None and self.prefetch is not None and not self.prefetch.is_ready(request.lora_request):
            return None, False
        tail = tail_of(request, self._block_size)
        if tail in self._leaders and self._leaders[tail].request_id != request.request_id:
            return None, False
        if num_computed_tokens >= _end(request):
            return 0, False
        ahead = _tokens_at(request, num_computed_tokens, self._block_size)
        alike = {kept: _common(kept.tokens, ahead.tokens) for kept in self._kept if kept.before == ahead.before}
        if not any(alike.values()):
            return 0, False
        longest = max(alike, key=alike.__getitem__)
        self._found[request.request_id] = (longest, num_computed_tokens // self._block_size)
        return alike[longest], False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the copy into the request's block, and remember if this request computes its tail."""
        if num_external_tokens:
            kept, block = self._found.pop(request.request_id)
            self._kept.move_to_end(kept)
            self._loads.setdefault(self._kept[kept], []).append(blocks.get_block_ids()[0][block])
        tail = tail_of(request, self._block_size)
        if tail is not None and tail not in self._kept:
            self._leaders.setdefault(tail, request)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """The step's copies. A tail that this step completes can be had from the next one on."""
        if self.prefetch is not None:
            self.prefetch.begin_step()
            if not scheduler_output.num_scheduled_tokens:
                self.prefetch.wait()
        copies = Copies(loads=self._loads)
        self._loads = {}
        for tail, request in list(self._leaders.items()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            if request.num_computed_tokens + scheduled >= _end(request):
                del self._leaders[tail]
                full = len(self._kept) >= self._room
                self._kept[tail] = self._kept.popitem(last=False)[1] if full else len(self._kept)
                block_ids = self._manager.get_block_ids(request.request_id)[0]
                copies.saves[self._kept[tail]] = block_ids[_end(request) // self._block_size]
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """One that is gone computes nothing any more: of those that wait for its tail, the next computes it."""
        self._leaders = {tail: leader for tail, leader in self._leaders.items() if leader.request_id != request.request_id}
        self._found.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Forget all tails."""
        self._kept.clear()
        self._leaders.clear()
        self._found.clear()
        self._loads.clear()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to anybody outside."""
        return False

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Never called: this and the next three are for connectors that copy in the worker themselves."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@seam(
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry include_finished_set log_stats",
)
def scheduler_init(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """A scheduler that shares tails, where there can be any and nothing else stands in the way (`_may_share`)."""
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.additional_config
    room = config.get(KEPT_TAILS, DEFAULT_KEPT_TAILS) if isinstance(config, dict) else DEFAULT_KEPT_TAILS
    if room > 0 and self.connector is None and _may_share(vllm_config, self.kv_cache_config):
        self.connector = SharedTails(self.kv_cache_manager, self.block_size, room)
        self.connector_prefix_cache_stats = PrefixCacheStats() if self.log_stats else None


def _may_share(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether the engine generates with adapters, caches prefixes in blocks that are all alike, and writes nothing to them after a step."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return (
        vllm_config.lora_config is not None
        and vllm_config.model_config.runner_type == "generate"
        and vllm_config.cache_config.enable_prefix_caching
        and vllm_config.speculative_config is None
        and len(specs) == 1
        and type(specs[0]) is FullAttentionSpec  # not a kind of it: those keep more in a block than keys and values
        and not kv_cache_config.needs_kv_cache_zeroing
    )


@seam("vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache", "self reset_running_requests reset_connector")
def reset_prefix_cache(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
    """Tails are forgotten with the blocks, whether or not the caller knows of a connector: the base may have other weights now."""
    if isinstance(self.connector, SharedTails):
        self.connector.reset_cache()
    return original(self, *args, **kwargs)


@seam("vllm.v1.executor.abstract:Executor.init_kv_output_aggregator", "self connector")
def init_kv_output_aggregator(original: Callable[..., None], self: Any, connector: Any) -> None:
    """Only the first worker's output is of interest, as without a connector: ours has nothing to report."""
    if not isinstance(connector, SharedTails):
        original(self, connector)


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
    layers = _layers(runner) if copies.loads or copies.saves else []
    slots: dict[int, list[torch.Tensor]] = vars(runner).setdefault("tail_slots", {})  # slot -> its block in every layer
    for slot, block_ids in copies.loads.items():
        index = torch.tensor(block_ids).to(layers[0].device, non_blocking=True)
        for blocks, tail in zip(layers, slots[slot], strict=True):
            blocks.index_copy_(0, index, tail.expand(len(block_ids), *tail.shape))
    output = original(runner, scheduler_output, *args, **kwargs)
    for slot, block_id in copies.saves.items():
        slots[slot] = [blocks[block_id].clone() for blocks in layers]
    return output


def _layers(runner: Any) -> list[torch.Tensor]:
    """Every layer's keys and values, [blocks, ...]: attention kernels may cut a block into several smaller ones."""
    return [layer.unflatten(0, (runner.kv_cache_config.num_blocks, -1)) for layer in runner.kv_caches]
