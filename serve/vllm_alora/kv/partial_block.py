"""What the conversation has beyond whole KV blocks, its partial block, is computed once: not by
every rule, and not again when the conversation goes on.

vLLM shares whole blocks. The tokens between the last block boundary and an aLoRA's activation point
lie in a block with the adapter's own tokens, so every adapter would compute them: half a block on
average, as much as a short rule. Here one request computes them, and the others get them as the
start of their own block: in the step that completes them, in which every layer copies them before
it attends, if no captured graph computes that step; later from a copy that is kept. A conversation
that has grown gets the copy as far as it begins alike; what lies behind is overwritten or masked.

This is the scheduler's half, a KV connector. `partial_block_seams.py` puts it in place;
`partial_block_copies.py` is the worker's half. Base requests and plain LoRAs are left alone. Remove
when vLLM shares parts of blocks between requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus

from ..handover import ActivatedRequest
from ..weights.prefetch import Prefetch

# On an attention layer that copies what is shared in a step: True.
COPIES_SHARES = "copies_shares"


class PartialBlock(NamedTuple):
    """`tokens` that do not fill a block, up to an activation point, behind those named `before`."""

    before: Hashable
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """A partial block that a step completes, and the blocks that begin with it in this step. The
    step computes the tokens of the block `source` from `start` to `stop`. Tokens before `start`
    were computed earlier; `start == stop` means all were.
    """

    source: int
    start: int
    stop: int
    blocks: tuple[int, ...]


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies, before, after and in its forward pass. Before it slots into blocks (slot
    -> block ids), after it blocks into slots (slot -> block id), and the `shares` in it.
    """

    loads: dict[int, list[int]] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)


def partial_block_of(request: Any, block_size: int) -> PartialBlock | None:
    """The request's partial block; None without an aLoRA, or if no block is cut."""
    end = _end(request)
    start = end // block_size * block_size
    if start >= end:
        return None
    return _tokens_at(request, start, block_size)


def _tokens_at(request: Any, start: int, block_size: int) -> PartialBlock:
    """The base's tokens from a block boundary on, at most a block."""
    before = request.cache_salt
    if start:  # a block's hash names all tokens up to its end
        before = request.block_hashes[start // block_size - 1]
    stop = min(start + block_size, _end(request))
    return PartialBlock(before, tuple(request.prompt_token_ids[start:stop]))


def _end(request: Any) -> int:
    """The end of the tokens that all adapters have in common; 0 if there are none."""
    lora = request.lora_request
    if isinstance(lora, ActivatedRequest) and not request.mm_features:
        return lora.activation_start
    return 0


class SharedPartialBlocks(KVConnectorBase_V1):
    """The partial blocks that are kept, the requests that compute one, and the copies of a step.

    One per scheduler. `in_step_above`: one may be used in the step that completes it if that step
    has more tokens; None: it never may. The life of a partial block:

    - `update_state_after_alloc` makes the first request that needs it its leader (`_leaders`). For
      others `get_num_new_matched_tokens` says None, and they wait for a step that completes it, in
      which they may begin with it (`_matched`, `_shares`). If the leader ends, the next one leads.
    - `build_connector_meta` of the step that completes it gives it a slot, and the step's copies.
      `followers`, which are put into the step after that, `can_join` and `join` these.
    - `get_num_new_matched_tokens` finds it in its slot (`_kept`) for requests that begin alike,
      `update_state_after_alloc` plans its copy (`_loads`), and `build_connector_meta` hands it on.
    - The least recently used one is evicted for another, and all by `reset_cache`.
    """

    def __init__(
        self, kv_cache_manager: Any, block_size: int, room: int, *, in_step_above: int | None
    ) -> None:  # the base class's wants a configuration
        self._manager = kv_cache_manager
        self._block_size = block_size
        self._room = room
        self._in_step_above = in_step_above
        # Partial block -> its slot, the least recently used first.
        self._kept: OrderedDict[PartialBlock, int] = OrderedDict()
        self._leaders: dict[PartialBlock, Any] = {}  # partial block -> the request that computes it
        # Request id -> the partial block it begins with, and the number of its own block.
        self._matched: dict[str, tuple[PartialBlock, int]] = {}
        self._loads: dict[int, list[int]] = {}  # slot -> the blocks that begin with what it holds
        # Partial block that this step completes -> the blocks that begin with it.
        self._shares: dict[PartialBlock, list[int]] = {}
        # Reads the adapters of waiting requests, if anybody does.
        self.prefetch: Prefetch | None = None

    def _partial_block(self, request: Any) -> PartialBlock | None:
        if not hasattr(request, "partial_block"):
            request.partial_block = partial_block_of(request, self._block_size)
        return request.partial_block  # type: ignore[no-any-return]

    def on_new_request(self, request: Any) -> None:
        """Begin to read its adapter, whether or not a step has room for it yet."""
        self.has_adapter(request)

    def has_adapter(self, request: Any) -> bool:
        """Whether the request's adapter is in memory; if not, it is being read from now on."""
        if request.lora_request is None or self.prefetch is None:
            return True
        return self.prefetch.is_ready(request.lora_request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The number of tokens, behind those in the prefix cache, that are kept or computed now.
        None while another request has still to compute them, and while the request's adapter is
        read from disk.
        """
        partial = self._partial_block(request)
        leader = self._leaders.get(partial) if partial else None
        if leader is not None and leader.request_id == request.request_id:
            leader = None
        if leader is not None and leader.status == RequestStatus.PREEMPTED:
            # The leader's adapter may have to be read first. Asking for this request's would hold a
            # place of the prefetch, which the leader could then not get.
            return None, False
        if not self.has_adapter(request):
            return None, False
        if partial and leader is not None:
            return self._from_leader(request, num_computed_tokens, partial, leader), False
        return self._from_kept(request, num_computed_tokens), False

    def _from_leader(
        self, request: Any, computed_tokens: int, partial: PartialBlock, leader: Any
    ) -> int | None:
        """How many tokens the request begins with in the step that is being planned, of the partial
        block that `leader` computes; None if it has to wait for a later step.
        """
        left = _end(request) - computed_tokens
        if not self._is_shared_now(leader) or left != len(partial.tokens):
            return None
        self._matched[request.request_id] = (partial, computed_tokens // self._block_size)
        return len(partial.tokens)

    def _from_kept(self, request: Any, computed_tokens: int) -> int:
        """How many tokens the request begins with, of a partial block that is kept."""
        if computed_tokens >= _end(request):
            return 0
        ahead = _tokens_at(request, computed_tokens, self._block_size)
        longest, length = self._longest_kept(ahead)
        if longest is None:
            return 0
        self._matched[request.request_id] = (longest, computed_tokens // self._block_size)
        return length

    def _is_shared_now(self, leader: Any) -> bool:
        """Whether the step that is being planned computes the leader's partial block to its end and
        is large enough to share it: the leader's own tokens are, and others only add to them. A
        request that was preempted since does not run.
        """
        if self._in_step_above is None or leader.status != RequestStatus.RUNNING:
            return False
        is_completed: bool = getattr(leader, "computed_after_step", 0) >= _end(leader)
        return is_completed and leader.tokens_in_step > self._in_step_above

    def _longest_kept(self, ahead: PartialBlock) -> tuple[PartialBlock | None, int]:
        """The kept block that begins with most of the tokens `ahead`, and the number of these. None
        if no block begins with any. Among equally good blocks, the one kept first.
        """
        longest, length = None, 0
        for candidate in self._kept:
            if candidate.before == ahead.before:
                common = _common_tokens(candidate.tokens, ahead.tokens)
                if common > length:
                    longest, length = candidate, common
        return longest, length

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the copy into the request's block, and remember whether it computes its own."""
        if num_external_tokens:
            matched, number = self._matched.pop(request.request_id)
            block = blocks.blocks[0][number].block_id
            slot = self._kept.get(matched)
            if slot is None:
                self._shares.setdefault(matched, []).append(block)
            else:
                self._kept.move_to_end(matched)
                self._loads.setdefault(slot, []).append(block)
        partial = self._partial_block(request)
        if partial is not None and partial not in self._kept:
            self._leaders.setdefault(partial, request)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """The step's copies. Later requests find a copy of a partial block that it completes."""
        if self.prefetch is not None:
            self.prefetch.begin_step()
            if not scheduler_output.num_scheduled_tokens:
                self.prefetch.wait()
        copies = Copies(loads=self._loads)
        self._loads = {}
        for partial, request in list(self._leaders.items()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            if request.num_computed_tokens + scheduled >= _end(request):
                del self._leaders[partial]
                self._complete(partial, request, copies)
        if self._shares:
            raise RuntimeError(
                f"{len(self._shares)} partial blocks are used in a step that does not complete them"
            )
        return copies

    def _complete(self, partial: PartialBlock, request: Any, copies: Copies) -> None:
        """Keep the block that `request` completes in this step, and share it."""
        slot = len(self._kept)
        if slot >= self._room:
            slot = self._kept.popitem(last=False)[1]
        self._kept[partial] = slot
        copies.saves[slot] = self._block_of(request)
        sharers = self._shares.pop(partial, None)
        if sharers:
            copies.shares.append(self._share(request, request.num_computed_tokens, sharers))

    def _block_of(self, request: Any) -> int:
        block_ids = self._manager.get_block_ids(request.request_id)[0]
        return int(block_ids[_end(request) // self._block_size])

    def _share(self, request: Any, computed_before: int, blocks: Sequence[int]) -> Share:
        """What a step shares if it completes `request`, with `computed_before` tokens before it."""
        number, used = divmod(_end(request), self._block_size)
        # All of it and more, where the request found its own last block in the cache.
        start = min(max(computed_before - number * self._block_size, 0), used)
        return Share(self._block_of(request), start, used, tuple(blocks))

    def can_join(self, leader: Any, copies: Copies) -> bool:
        """Whether requests that begin with all that the base computes of `leader` may go into the
        step with these copies, which completes it or begins with it.
        """
        partial = self._partial_block(leader)
        if partial is None:
            return True
        slot = self._kept.get(partial)
        if slot is None:
            return False
        source = copies.saves.get(slot)
        if source is None or source in [share.source for share in copies.shares]:
            return True
        return source == self._block_of(leader) and self._is_shared_now(leader)

    def join(self, leader: Any, blocks: Sequence[int], copies: Copies) -> None:
        """Plan what the blocks of those requests, which `can_join`, begin with."""
        partial = self._partial_block(leader)
        if partial is None:
            return
        slot = self._kept[partial]
        self._kept.move_to_end(partial)
        source = copies.saves.get(slot)
        if source is None:
            copies.loads.setdefault(slot, []).extend(blocks)
            return
        for number, share in enumerate(copies.shares):
            if share.source == source:
                copies.shares[number] = replace(share, blocks=(*share.blocks, *blocks))
                return
        computed_before = leader.num_computed_tokens - leader.tokens_in_step
        copies.shares.append(self._share(leader, computed_before, blocks))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the next request that waits for a partial block compute it, if this one was to."""
        self._leaders = {
            partial: leader
            for partial, leader in self._leaders.items()
            if leader.request_id != request.request_id
        }
        self._matched.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Forget all partial blocks."""
        self._kept.clear()
        self._leaders.clear()
        self._matched.clear()
        self._loads.clear()
        self._shares.clear()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed to anybody outside."""
        return False

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Never called, as the next three: they are of connectors that copy in the worker."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def _common_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of leading tokens that both sequences share."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
