"""Seams: a conversation's other rules go, as a group, into the step that completes it.

A hundred rules on a conversation are a hundred requests, each of which vLLM's scheduler queues,
looks up, plans and allocates. Here only the first goes that way, the leader; an engine in this
process hands over the others as its followers (`follow`). The step that computes the leader's
conversation to its end takes them, as far as it has room, which is kept for them. The rest go with
the next step. Remove when vLLM schedules requests that share a prompt together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

from ..handover import ActivatedRequest
from ..seam import seam
from ..shared_prompt import SharedPrompt, prefix_of
from .allocation import BehindHeldBlocks, has_plain_blocks
from .partial_block import SharedPartialBlocks


@dataclass
class Group:
    """A request that waits or is being computed, and those that go with it. The conversation is
    their first `end` tokens: the base computes them, up to the activation point of all.
    """

    leader: Request
    end: int
    followers: list[Any] = field(default_factory=list)


def groups_of(scheduler: Any) -> dict[str, Group]:
    """The scheduler's groups, by their leaders' ids, in the order in which these came."""
    groups: dict[str, Group] = vars(scheduler).setdefault("groups", {})
    return groups


def follow(
    scheduler: Any,
    leader: Request,
    request_id: str,
    prompt: SharedPrompt,
    lora: Any,
    priority: int,
    params: SamplingParams,
) -> bool:
    """Queue a request behind a leader that is queued: another adapter on the leader's conversation,
    with its cache salt. `params` may differ from the leader's in their `extra_args` alone. False,
    and nothing is queued, if it is not of that kind, if the leader's turn has come already, or if
    blocks of its own are cached: vLLM finds them.
    """
    end = 0  # of the leader's conversation in tokens, if it can be a leader
    if isinstance(leader.lora_request, ActivatedRequest):
        end = leader.lora_request.activation_start
    may_follow = (
        end > 0
        and leader.status == RequestStatus.WAITING
        and isinstance(lora, ActivatedRequest)
        and lora.activation_start == end
        and prompt.prefix is prefix_of(leader.prompt_token_ids)
        and end <= len(prompt.prefix.token_ids)
        and not leader.skip_reading_prefix_cache
        and not leader.use_structured_output
        and _takes_followers(scheduler)
    )
    if not may_follow:
        return False
    blocks = end // scheduler.block_size
    follower = _follower(leader, request_id, prompt, lora, blocks)
    follower.sampling_params = params
    follower.priority = priority
    own_hashes = follower.block_hashes[blocks:]
    pool = scheduler.kv_cache_manager.block_pool
    if own_hashes and pool.get_cached_block(own_hashes[0], [0]):
        return False
    groups_of(scheduler).setdefault(leader.request_id, Group(leader, end)).followers.append(
        follower
    )
    scheduler.connector.on_new_request(follower)
    return True


def _takes_followers(scheduler: Any) -> bool:
    """Whether the engine shares partial blocks of a plain cache, plans no step before the output of
    the last, and nobody counts its requests' events.
    """
    shares = isinstance(scheduler.connector, SharedPartialBlocks)
    is_plain = has_plain_blocks(scheduler.kv_cache_manager)
    is_simple = type(scheduler) is Scheduler and scheduler.aux_output_connector is None
    return bool(shares and is_plain and is_simple and not scheduler.log_stats)


def _follower(
    leader: Request, request_id: str, prompt: SharedPrompt, lora: Any, blocks: int
) -> Request:
    """The request as vLLM's constructor makes it, with the leader's settings and block names."""
    request: Request = object.__new__(Request)
    vars(request).update(vars(leader))
    request.request_id = request_id
    request.lora_request = lora
    request.arrival_time = time.time()
    request.prompt_token_ids = prompt  # type: ignore[assignment]
    request.num_prompt_tokens = len(prompt)
    request._output_token_ids = []
    request._all_token_ids = prompt.copy()  # type: ignore[assignment]
    request.output_token_ids = ConstantList(request._output_token_ids)
    request.all_token_ids = ConstantList(request._all_token_ids)
    request.events = []
    request.spec_token_ids = []
    request.mm_features = []
    request._prompt_embeds_per_block_hashes = {}
    request.prefill_stats = PrefillStats()
    request.block_hashes = leader.block_hashes[:blocks]
    request.update_block_hashes()
    return request


@seam("vllm.v1.core.sched.scheduler:Scheduler.schedule", "self throttle_prefills")
def schedule(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The step, with the followers of all conversations that it completes."""
    groups = groups_of(self)
    if not groups:
        return original(self, *args, **kwargs)
    with _room_kept(self, groups):
        output = original(self, *args, **kwargs)
    step = PlannedStep(self, output)
    for group in sorted(groups.values(), key=lambda group: group.leader):
        leader = group.leader
        if leader.status == RequestStatus.WAITING and leader not in self.deferred_waiting:
            continue  # its turn has not come
        is_running = leader.status == RequestStatus.RUNNING
        if is_running and leader.num_computed_tokens < group.end:
            continue  # a later step completes its conversation
        del groups[leader.request_id]
        if is_running and leader.request_id in output.num_scheduled_tokens:
            _queue_together(self, group.end, step.admit(group))
        else:
            _queue_each(self, group.followers)
    return output


def _queue_each(scheduler: Any, requests: Iterable[Request]) -> None:
    """Queue each request by itself: its leader is gone, or waits for its adapter."""
    for request in requests:
        scheduler.add_request(request)


def _queue_together(scheduler: Any, end: int, requests: list[Request]) -> None:
    if requests:
        leader, *followers = requests
        scheduler.add_request(leader)
        if followers:
            groups_of(scheduler)[leader.request_id] = Group(leader, end, followers)


@dataclass
class StepRoom:
    """What a step has left: tokens, and places for sequences. `adapters` are the ids of those that
    it uses, of which there may be `max_adapters`. What is kept for followers before a step is
    planned, and who is then put into it, are decided by this alone.
    """

    tokens: int
    places: int
    max_adapters: int
    adapters: set[int] = field(default_factory=set)

    def fits(self, tokens: int, lora: Any) -> bool:
        has_slot = lora.lora_int_id in self.adapters or len(self.adapters) < self.max_adapters
        return tokens <= self.tokens and self.places > 0 and has_slot

    def take(self, tokens: int, lora: Any | None) -> None:
        """Count a request of so many tokens, whether or not it fits."""
        self.tokens -= tokens
        self.places -= 1
        self.use(lora)

    def use(self, lora: Any | None) -> None:
        """Count an adapter as used; None is the base."""
        if lora is not None:
            self.adapters.add(lora.lora_int_id)


@contextlib.contextmanager
def _room_kept(scheduler: Any, groups: Mapping[str, Group]) -> Iterator[None]:
    """Keep tokens and sequences of the step for the followers of the leaders that come into it."""
    tokens, places = scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs
    kept_tokens, kept_places = _kept(scheduler, groups)
    scheduler.max_num_scheduled_tokens -= kept_tokens
    scheduler.max_num_active_reqs -= kept_places
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs = tokens, places


def _kept(scheduler: Any, groups: Mapping[str, Group]) -> tuple[int, int]:
    """The tokens and the sequences of the step that are its leaders' followers', if requests are
    taken in the order in which vLLM takes them, each followed by its own. Where a follower finds
    too few tokens, nobody behind it gets these.
    """
    room = StepRoom(
        tokens=scheduler.max_num_scheduled_tokens,
        places=scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input,
        max_adapters=scheduler.lora_config.max_loras,
    )
    kept_tokens, kept_places = 0, 0
    for request in chain(scheduler.running, scheduler.waiting):
        room.take(request.num_tokens - _computed(request), request.lora_request)
        if room.tokens <= 0 or room.places <= 0:
            break
        group = groups.get(request.request_id)
        if group is None:
            continue
        for follower in group.followers:
            own_tokens = follower.num_tokens - group.end
            if own_tokens > room.tokens:
                return kept_tokens + room.tokens, kept_places
            if room.fits(own_tokens, follower.lora_request):
                room.take(own_tokens, follower.lora_request)
                kept_tokens += own_tokens
                kept_places += 1
    return kept_tokens, kept_places


def _computed(request: Request) -> int:
    """The number of a request's tokens that need not be computed. For a waiting request, those that
    the cache held when it came (`resident`): for a running one, these may have been evicted since.
    """
    if request.status != RequestStatus.WAITING:
        return request.num_computed_tokens
    return max(request.num_computed_tokens, getattr(request, "resident_tokens", 0))


class PlannedStep:
    """A step that vLLM's scheduler has planned, and how followers are put into it."""

    def __init__(self, scheduler: Any, output: Any) -> None:
        self._scheduler = scheduler
        self._output = output
        self._connector: SharedPartialBlocks = scheduler.connector
        active = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        self._room = StepRoom(
            tokens=scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens,
            places=scheduler.max_num_active_reqs - active,
            max_adapters=scheduler.lora_config.max_loras,
        )
        self._is_open = (
            scheduler.pause_state == PauseState.UNPAUSED and not output.preempted_req_ids
        )
        for request_id in output.num_scheduled_tokens:
            self._room.use(scheduler.requests[request_id].lora_request)

    def admit(self, group: Group) -> list[Request]:
        """Put the followers into the step; those that have no room in it."""
        copies = self._output.kv_connector_metadata
        if not self._is_open or not self._connector.can_join(group.leader, copies):
            return group.followers
        blocks = BehindHeldBlocks(self._scheduler.kv_cache_manager, group.leader, group.end)
        left_behind = []
        partial_blocks = []
        for request in group.followers:
            fits = self._room.fits(request.num_tokens - group.end, request.lora_request)
            has_room = fits and self._connector.has_adapter(request)
            if has_room and blocks.are_there_for(request):
                # First, so that it is cleared away with the others whatever happens.
                self._run(request)
                block_ids = blocks.give(request)
                partial_blocks.append(block_ids[blocks.held_count])
                self._put(request, group.end, block_ids)
            else:
                left_behind.append(request)
        if partial_blocks:
            self._connector.join(group.leader, partial_blocks, copies)
            self._output.has_sync_kv_loads = True
        return left_behind

    def _run(self, request: Any) -> None:
        request.status = RequestStatus.RUNNING
        self._scheduler.requests[request.request_id] = request
        self._scheduler.running.append(request)

    def _put(self, request: Any, end: int, block_ids: list[int]) -> None:
        """As vLLM does: admit a request, and note that all of its tokens are planned."""
        scheduler, output = self._scheduler, self._output
        tokens = request.num_tokens - end
        whole = end // scheduler.block_size * scheduler.block_size
        request.num_computed_tokens = end
        request.prefill_stats.set(request.num_prompt_tokens, whole, end - whole)
        prefill_token_ids = None
        if scheduler.use_v2_model_runner:
            prefill_token_ids = request._all_token_ids
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=request.mm_features,
                sampling_params=request.sampling_params,
                pooling_params=None,
                block_ids=(block_ids,),
                num_computed_tokens=end,
                lora_request=request.lora_request,
                prefill_token_ids=prefill_token_ids,
            )
        )
        output.num_scheduled_tokens[request.request_id] = tokens
        output.total_num_scheduled_tokens += tokens
        request.num_computed_tokens += tokens
        request.num_in_flight_tokens += tokens
        request.last_sched_seq = scheduler.sched_step_seq
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.add(request.request_id)
        self._room.take(tokens, request.lora_request)


@seam("vllm.v1.core.sched.scheduler:Scheduler.finish_requests", "self request_ids finished_status")
def finish_requests(
    original: Callable[..., Any], self: Any, request_ids: Any, finished_status: RequestStatus
) -> Any:
    """Drop waiting followers too. Followers of a dropped leader become requests like any other."""
    groups = groups_of(self)
    if not groups:
        return original(self, request_ids, finished_status)
    if request_ids is None:
        groups.clear()
        return original(self, None, finished_status)
    ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
    for leader_id, group in list(groups.items()):
        group.followers = [
            follower for follower in group.followers if follower.request_id not in ids
        ]
        if leader_id in ids:
            del groups[leader_id]
            _queue_each(self, group.followers)
    return original(self, ids, finished_status)
