from __future__ import annotations

from serve.plan.replay.slots import AdapterSlots


def test_an_adapter_without_a_slot_is_copied_once_and_then_stays() -> None:
    slots = AdapterSlots(adapters=4, slots=2, host=4)
    assert slots.use({0, 1}) == (0, 0)
    assert slots.use({2}) == (1, 0)
    assert slots.use({2}) == (0, 0)


def test_what_is_not_in_host_memory_is_read_from_disk_too() -> None:
    slots = AdapterSlots(adapters=4, slots=1, host=2)
    assert slots.use({3}) == (1, 1)
    assert slots.use({3}) == (0, 0)


def test_the_adapter_asked_least_often_goes_first() -> None:
    slots = AdapterSlots(adapters=3, slots=2, host=3)
    for _ in range(8):
        slots.use({0})
    slots.use({1})
    slots.use({2})
    assert slots.use({0}) == (0, 0), "the popular one kept its slot"
    assert slots.in_slots_first((1, 2, 0)) == (2, 0, 1)


def test_where_all_have_slots_nothing_is_ever_copied() -> None:
    slots = AdapterSlots(adapters=3, slots=3, host=1)
    assert slots.always_fit and slots.use({0, 1, 2}) == (0, 0)
    assert slots.in_slots_first((2, 0)) == (2, 0)
