"""Seam: of the requests that wait, those come earlier of which the prefix cache holds more.

The cache gives up what was used longest ago. Of more conversations than it holds, asked about again in the order in which they came, each
finds its blocks given to the one before it: hardly anything is reused, however little the cache is too small. Whoever counts priorities
in tokens says so (`RESIDENT_FIRST`); then a request goes ahead by the tokens that are there when it arrives, so that nobody waits for
what arrived more than a prompt's length behind. Can go when vLLM's scheduler looks at the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .seam import seam

RESIDENT_FIRST = "vllm_alora_resident_first"  # in EngineArgs.additional_config: True where a priority is a number of tokens


@seam("vllm.v1.core.sched.scheduler:Scheduler.add_request", "self request")
def add_request(original: Callable[..., None], self: Any, request: Any) -> None:
    """Put the request into the queue, ahead by its tokens in the prefix cache."""
    config = self.vllm_config.additional_config
    if isinstance(config, dict) and config.get(RESIDENT_FIRST) and request.request_id not in self.requests:
        request.priority -= self.kv_cache_manager.get_computed_blocks(request)[1]
    original(self, request)
