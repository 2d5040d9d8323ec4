"""Seam: requests of which the prefix cache holds more are served earlier.

The cache evicts the least recently used blocks: when conversations outnumber it and return in
order, the blocks of each have just been evicted. An engine whose priorities are a virtual time that
advances by the tokens answered says so (`RESIDENT_FIRST`); then a request goes ahead by the tokens
that are there when it comes, and one that waits is overtaken for a prompt's length at most. Remove
when vLLM's scheduler looks at the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from ..seam import seam, setting

# In EngineArgs.additional_config: True where priorities are a virtual time in tokens.
RESIDENT_FIRST = "vllm_alora_resident_first"


@seam("vllm.v1.core.sched.scheduler:Scheduler.add_request", "self request")
def add_request(original: Callable[..., None], self: Any, request: Any) -> None:
    """Put the request into the queue, ahead by its tokens in the prefix cache."""
    manager = self.kv_cache_manager
    if (
        setting(self.vllm_config, RESIDENT_FIRST)
        and self.policy == SchedulingPolicy.PRIORITY
        and request.request_id not in self.requests
        and manager.prefix_cache_lookup_enabled(request)
    ):
        request.resident_tokens = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )[1]
        request.priority -= request.resident_tokens
    original(self, request)
