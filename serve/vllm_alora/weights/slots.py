"""Seams: the eviction policy of adapter slots, least frequently used with a half-life.

vLLM evicts the adapter used least recently, perhaps for another one of the same step, and in a
round-robin over one more adapter than there are slots swaps in every one every time. Here a step's
adapters keep their slots, and of the others the one asked least often is evicted: counted with a
half-life, by powers of two, and among equals the last one that came. The same holds for host
memory. Pinned ones stay. Remove when vLLM weighs how often an adapter is asked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..seam import seam

HALF_LIFE = 2000  # steps after which having been asked counts half
FORGOTTEN = 2.0**-10  # below this a count is dropped


class Heat:
    """How often each adapter was asked, in steps, earlier ones counting less."""

    def __init__(self) -> None:
        self._step = 0
        # Adapter id -> its count, and the step that it is as of.
        self._counted: dict[int, tuple[float, int]] = {}
        # Adapter id -> the step at which it was swapped in.
        self._swapped_in_at: dict[int, int] = {}
        self.needed: frozenset[int] = frozenset()  # the adapters of this step

    def begin(self, needed: Iterable[int]) -> None:
        """Begin a step that needs these adapters."""
        self.needed = frozenset(needed)
        self._step += 1
        for adapter in self.needed:
            self._counted[adapter] = (self.of(adapter) + 1, self._step)
        if self._step % HALF_LIFE == 0:
            self._counted = {
                adapter: counted
                for adapter, counted in self._counted.items()
                if self.of(adapter) > FORGOTTEN
            }
            self._swapped_in_at = {
                adapter: step
                for adapter, step in self._swapped_in_at.items()
                if adapter in self._counted
            }

    def swap_in(self, adapter: int) -> None:
        self._swapped_in_at[adapter] = self._step

    def of(self, adapter: int) -> float:
        count, since = self._counted.get(adapter, (0.0, 0))
        return count * math.pow(0.5, (self._step - since) / HALF_LIFE)

    def coldest(self, adapters: Collection[int]) -> int:
        """The adapter to evict, by its id; one that this step needs is the last choice."""
        free = [adapter for adapter in adapters if adapter not in self.needed]
        return min(free or adapters, key=self._eviction_key)

    def _eviction_key(self, adapter: int) -> tuple[int, int]:
        """The adapter with the lowest is evicted first."""
        count, power = self.of(adapter), -(2**30)
        if count:
            power = math.frexp(count)[1]  # counts that are nearly alike count as equal
        return power, -self._swapped_in_at.get(adapter, 0)


@seam("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters", "self lora_requests")
def apply_adapters(original: Callable[..., None], self: Any, lora_requests: Iterable[Any]) -> None:
    """Swap in those of the step's adapters that have no slot yet; the others keep theirs."""
    manager = self._adapter_manager
    requests = [request for request in lora_requests if request]
    heat_of(manager).begin(request.lora_int_id for request in requests)
    if len(requests) <= manager.lora_slots:
        requests = [request for request in requests if not _has_slot(self, request)]
    original(self, requests)  # refuses more than there are slots


@seam("vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter", "self lora_id")
def activate_adapter(original: Callable[..., bool], self: Any, lora_id: int) -> bool:
    """Give the adapter a slot; if none is free, that of the coldest. vLLM counts it as active
    before its weights are copied. If they are not, it has no slot: in the next step it would be
    computed with what an earlier adapter has left there.
    """
    active = self._active_adapters
    if lora_id not in active:
        heat_of(self).swap_in(lora_id)
        unpinned = _unpinned(active)
        if len(active) >= self.lora_slots and unpinned:
            active.pop(heat_of(self).coldest(unpinned))
    try:
        return original(self, lora_id)
    except BaseException:
        self.deactivate_adapter(lora_id)
        raise


@seam("vllm.lora.model_manager:LRUCacheLoRAModelManager.remove_oldest_adapter", "self")
def remove_oldest_adapter(original: Callable[..., bool], self: Any) -> bool:
    """Host memory is full: the coldest adapter that is not needed goes, rather one without slot."""
    unpinned = _unpinned(self._registered_adapters)
    heat = heat_of(self)
    if not unpinned:
        return original(self)
    not_needed = [adapter for adapter in unpinned if adapter not in heat.needed]
    without_slot = [adapter for adapter in not_needed if adapter not in self._active_adapters]
    self._registered_adapters.pop(heat.coldest(without_slot or not_needed or unpinned))
    return True


def _has_slot(worker_manager: Any, request: Any) -> bool:
    """Whether the request's adapter is in a slot, with the content that the request names."""
    adapter_id = request.lora_int_id
    named_content = getattr(request, "content", None)
    if named_content is None or adapter_id not in worker_manager._adapter_manager._active_adapters:
        return False
    loaded_content = getattr(worker_manager, "content_of_id", {}).get(adapter_id)
    return bool(loaded_content == named_content)


def heat_of(manager: Any) -> Heat:
    """How often the adapters of a vLLM adapter manager were asked."""
    heat: Heat = vars(manager).setdefault("adapter_heat", Heat())
    return heat


def _unpinned(cache: Any) -> list[int]:
    return [adapter for adapter in cache if adapter not in cache.pinned_items]


# vLLM's Triton kernels keep the slots' tensors in tables of the process, by the tensors' addresses,
# and never drop an entry: a closed engine's slots would stay in device memory (5.6 GB for Qwen3-4B
# with 128 slots), and a later engine at the same addresses would be read with the old strides.
TABLES = "vllm.lora.ops.triton_ops.utils"


def forget_pointers(lora_manager: Any) -> None:
    """Drop the kernels' entries for this manager's slots, and no others: graphs read them."""
    tables: Any = sys.modules.get(TABLES)  # loaded where the kernels are
    if tables is None:
        return
    addresses: set[int] = set()
    for layer in lora_manager._adapter_manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            addresses.update(weights.data_ptr() for weights in stacked)
    for table in (tables._LORA_A_PTR_DICT, tables._LORA_B_PTR_DICT):
        for key in list(table):
            if not addresses.isdisjoint(key):
                del table[key]
