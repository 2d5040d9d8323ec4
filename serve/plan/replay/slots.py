"""Which adapters are on the device and in host memory, by the eviction policy of the plugin.

Knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Collection

from vllm_alora.weights.slots import Heat


class AdapterSlots:
    """Slots on the device, and copies in host memory; all other adapters lie on disk.

    At the start the first adapters are in both, as after an engine has loaded them.
    """

    def __init__(self, adapters: int, slots: int, host: int) -> None:
        self._slots, self._host_size = slots, max(host, slots)
        self._heat = Heat()
        self._in_slots = dict.fromkeys(range(min(adapters, slots)))
        self._in_host = dict.fromkeys(range(min(adapters, self._host_size)))
        self.always_fit = adapters <= slots

    def in_slots_first(self, rules: tuple[int, ...]) -> tuple[int, ...]:
        """The rules in the order in which the engine submits them."""
        if self.always_fit:
            return rules
        return tuple(sorted(rules, key=lambda rule: rule not in self._in_slots))

    def use(self, adapters: Collection[int]) -> tuple[int, int]:
        """Use these adapters in a step.

        Returns how many are copied into a slot, and how many are read from disk.
        """
        if self.always_fit:
            return 0, 0
        self._heat.begin(adapters)
        swap_ins = loads = 0
        for adapter in adapters:
            loads += self._load(adapter)
            swap_ins += self._swap_in(adapter)
        return swap_ins, loads

    def _load(self, adapter: int) -> int:
        if adapter in self._in_host:
            return 0
        if len(self._in_host) >= self._host_size:
            idle = [rival for rival in self._in_host if rival not in self._heat.needed]
            without_slot = [rival for rival in idle if rival not in self._in_slots]
            del self._in_host[self._heat.coldest(without_slot or idle or list(self._in_host))]
        self._in_host[adapter] = None
        return 1

    def _swap_in(self, adapter: int) -> int:
        if adapter in self._in_slots:
            return 0
        self._heat.swap_in(adapter)
        if len(self._in_slots) >= self._slots:
            del self._in_slots[self._heat.coldest(self._in_slots)]
        self._in_slots[adapter] = None
        return 1
