"""Seams: what the conversation has beyond whole KV blocks is computed once, not by every rule, and not again when it goes on.

vLLM shares whole blocks. The tokens between the last block boundary and an aLoRA's activation point (the prompt's tail) lie in a block
that also holds the adapter's own tokens, so every adapter computes them again: half a block on average, as much as a short rule.
Here one request computes a tail; the others get it as the start of their own block and compute nothing but their rule. Those that can,
begin in the very step that completes the tail (a CPU's; elsewhere a captured graph would not know of it): every layer writes
the tail's keys and values into their blocks too, before it attends. The others wait for that step: it leaves a copy of the
block. A conversation that has grown gets the copy too, as far as it begins with the same tokens. What a copy holds behind those
is overwritten, or masked like any unused slot.

This is the scheduler's half, a KV connector, vLLM's interface for keys and values from elsewhere; the worker's is `tail_copies.py`.
Both are put in place by seams, because a connector that is configured is one per process and not per engine.
Base requests and plain LoRAs are left alone. Can go when vLLM shares parts of blocks between requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from ..activation import ActivatedRequest
from ..seam import seam
from ..weights.prefetch import Prefetch

KEPT_TAILS = "vllm_alora_kept_partial_blocks"  # in EngineArgs.additional_config: how many, 0 for none. Each takes the memory of a KV block
DEFAULT_KEPT_TAILS = 32


class Tail(NamedTuple):
    """`tokens` that do not fill a block, up to an activation point. `before` names all tokens before them."""

    before: Hashable
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """A tail that a step completes, and the blocks of those that begin with it in this step.

    The step computes what the block `source` holds from `start` to `stop`; what is before that was there.
    """

    source: int
    start: int
    stop: int
    blocks: tuple[int, ...]


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies: before its forward pass slots into blocks (slot -> block ids), after it blocks into slots (slot -> block id).

    And `shares` in it.
    """

    loads: dict[int, list[int]] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)


def tail_of(request: Any, block_size: int) -> Tail | None:
    """The request's tail; None if it is no aLoRA's or the activation point is a block's first token."""
    start = _end(request) // block_size * block_size
    return _tokens_at(request, start, block_size) if start < _end(request) else None


def _tokens_at(request: Any, start: int, block_size: int) -> Tail:
    """The base's tokens from a block boundary on, at most a block."""
    before = (
        request.block_hashes[start // block_size - 1] if start else request.cache_salt
    )  # a block's hash names all tokens up to its end
    return Tail(
        before, tuple(request.prompt_token_ids[start : min(start + block_size, _end(request))])
    )


def _end(request: Any) -> int:
    """Where the tokens end that all adapters have in common; 0 if there are none."""
    lora = request.lora_request
    return (
        lora.activation_start
        if isinstance(lora, ActivatedRequest) and not request.mm_features
        else 0
    )


class SharedTails(KVConnectorBase_V1):
    """Which tails are kept in which slots, which request computes one, and what each step copies. One per scheduler.

    `in_step`: whether a tail may be used in the step that completes it.
    """

    def __init__(
        self, kv_cache_manager: Any, block_size: int, room: int, *, in_step: bool
    ) -> None:  # the base class's wants a configuration
        self._manager, self._block_size, self._room, self._in_step = (
            kv_cache_manager,
            block_size,
            room,
            in_step,
        )
        self._kept: OrderedDict[Tail, int] = (
            OrderedDict()
        )  # tail -> its slot, the least recently used first
        self._leaders: dict[Tail, Any] = {}  # tail -> the request that computes it
        self._found: dict[
            str, tuple[Tail, int]
        ] = {}  # request id -> the tail it begins with, and the number of its block
        self._loads: dict[int, list[int]] = {}  # slot -> the blocks that begin with its tail
        self._shares: dict[
            Tail, list[int]
        ] = {}  # tail that this step completes -> the blocks that begin with it
        self.prefetch: Prefetch | None = (
            None  # reads the adapters of waiting requests, if anybody does
        )

    def on_new_request(self, request: Any) -> None:
        """Begin to read its adapter, whether or not a step has room for it yet."""
        if request.lora_request is not None and self.prefetch is not None:
            self.prefetch.is_ready(request.lora_request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens behind those in the prefix cache another request has, or completes in this step.

        None while it does not complete them yet, and while the request's adapter is read from disk.
        """
        if (
            request.lora_request is not None
            and self.prefetch is not None
            and not self.prefetch.is_ready(request.lora_request)
        ):
            return None, False
        tail = tail_of(request, self._block_size)
        if tail in self._leaders and self._leaders[tail].request_id != request.request_id:
            if not (
                self._in_step
                and _is_completed(self._leaders[tail])
                and _end(request) - num_computed_tokens == len(tail.tokens)
            ):
                return None, False
            self._found[request.request_id] = (tail, num_computed_tokens // self._block_size)
            return len(tail.tokens), False
        if num_computed_tokens >= _end(request):
            return 0, False
        ahead = _tokens_at(request, num_computed_tokens, self._block_size)
        alike = {
            kept: _common(kept.tokens, ahead.tokens)
            for kept in self._kept
            if kept.before == ahead.before
        }
        if not any(alike.values()):
            return 0, False
        longest = max(alike, key=alike.__getitem__)
        self._found[request.request_id] = (longest, num_computed_tokens // self._block_size)
        return alike[longest], False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the copy into the request's block, and remember if this request computes its tail."""
        if num_external_tokens:
            found, number = self._found.pop(request.request_id)
            block = blocks.get_block_ids()[0][number]
            if found in self._kept:
                self._kept.move_to_end(found)
                self._loads.setdefault(self._kept[found], []).append(block)
            else:
                self._shares.setdefault(found, []).append(block)
        tail = tail_of(request, self._block_size)
        if tail is not None and tail not in self._kept:
            self._leaders.setdefault(tail, request)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """The step's copies. Of a tail that this step completes the next ones have a copy."""
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
                number, used = divmod(_end(request), self._block_size)
                block = self._manager.get_block_ids(request.request_id)[0][number]
                copies.saves[self._kept[tail]] = block
                if sharers := self._shares.pop(tail, None):
                    there = max(request.num_computed_tokens - number * self._block_size, 0)
                    copies.shares.append(Share(block, there, used, tuple(sharers)))
        if self._shares:
            raise RuntimeError(
                f"{len(self._shares)} tails are used in a step that does not complete them"
            )
        return copies

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """One that is gone computes nothing any more: of those that wait for its tail, the next computes it."""
        self._leaders = {
            tail: leader
            for tail, leader in self._leaders.items()
            if leader.request_id != request.request_id
        }
        self._found.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Forget all tails."""
        self._kept.clear()
        self._leaders.clear()
        self._found.clear()
        self._loads.clear()
        self._shares.clear()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to anybody outside."""
        return False

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Never called: this and the next three are for connectors that copy in the worker themselves."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def _is_completed(request: Any) -> bool:
    """Whether the step that is being planned computes the request's tail to its end; a request preempted since does not run."""
    return request.status == RequestStatus.RUNNING and getattr(
        request, "computed_after_step", 0
    ) >= _end(request)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@seam(
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry include_finished_set log_stats",
)
def scheduler_init(
    original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """A scheduler that shares tails, where there can be any and nothing else stands in the way (`_may_share`)."""
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.additional_config
    room = (
        config.get(KEPT_TAILS, DEFAULT_KEPT_TAILS)
        if isinstance(config, dict)
        else DEFAULT_KEPT_TAILS
    )
    if room > 0 and self.connector is None and _may_share(vllm_config, self.kv_cache_config):
        self.connector = SharedTails(
            self.kv_cache_manager, self.block_size, room, in_step=current_platform.is_cpu()
        )
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
        and type(specs[0])
        is FullAttentionSpec  # not a kind of it: those keep more in a block than keys and values
        and not kv_cache_config.needs_kv_cache_zeroing
    )


@seam(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens num_external_computed_tokens "
    "delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks has_scheduled_reqs skip_zeroing_group_ids",
)
def allocate_slots(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    num_new_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Note how far the planned step computes the request: the scheduler itself tells only when all of the step is planned."""
    blocks = original(self, request, num_new_tokens, *args, **kwargs)
    if blocks is not None:
        cached = kwargs.get("num_new_computed_tokens", 0) + kwargs.get(
            "num_external_computed_tokens", 0
        )
        request.computed_after_step = request.num_computed_tokens + cached + num_new_tokens
    return blocks


@seam(
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
    "self reset_running_requests reset_connector",
)
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
