"""The engines that the pressure benchmark measures."""

from __future__ import annotations

from serve.bench.pressure.work import DEMANDS, PressureWork


def test_every_kind_of_engine_gets_the_work_at_every_demand() -> None:
    work = PressureWork(rules=5, few_slots=2)
    expected = []
    for slots, order in ((5, "cache-aware"), (2, "cache-aware"), (5, "FCFS")):
        expected += [(slots, order, demand) for demand in DEMANDS]
    assert [(engine.slots, engine.order, engine.demand) for engine in work.engines] == expected


def test_there_are_never_more_slots_than_rules() -> None:
    slots = {engine.slots for engine in PressureWork(rules=4, few_slots=8).engines}
    assert slots == {4}
