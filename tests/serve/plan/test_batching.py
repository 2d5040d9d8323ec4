from __future__ import annotations

import pytest

from serve.plan.batching import AdapterSlots, ScheduledStep, StepScheduler
from tests.serve.plan.on_paper import sizes


def steps_of(scheduler: StepScheduler) -> list[ScheduledStep]:
    steps = []
    while scheduler.is_busy:
        steps.append(scheduler.next_step())
    return steps


def test_aloras_compute_the_conversation_once_and_loras_once_a_rule() -> None:
    for shares, tokens in ((True, 40 + 3 * 5), (False, 3 * (40 + 5))):
        scheduler = StepScheduler(sizes(step_tokens=1000), 5, shares=shares)
        scheduler.submit(0, 40, 0, (0, 1, 2))
        [step] = steps_of(scheduler)
        assert step.work.tokens == tokens and step.work.sequences == 3
        assert step.answered == [(0, 3)]
        assert step.work.adapted == (15 if shares else tokens)


def test_a_step_is_cut_at_its_tokens_and_the_rest_goes_on_in_the_next() -> None:
    scheduler = StepScheduler(sizes(step_tokens=30), 5, shares=True)
    scheduler.submit(0, 40, 0, (0, 1, 2))
    first, second = steps_of(scheduler)
    assert first.work.tokens == 30 and first.answered == [] and first.work.sequences == 1
    assert second.work.tokens == 25 and second.answered == [(0, 3)]
    assert (first.work.reads, second.work.reads) == (0, 30 + 2 * 40)
    # 40 tokens attend to those before them, the first rule's 5 too, each further rule's to 40 + 5.
    pairs = 45 * 45 / 2 + 2 * (5 * 40 + 5 * 5 / 2)
    assert first.work.pairs + second.work.pairs == pytest.approx(pairs)


def test_a_step_holds_so_many_sequences_and_adapters() -> None:
    many = StepScheduler(sizes(max_sequences=4, slots=3), 1, shares=True)
    many.submit(0, 10, 0, range(7))
    assert [len(step.adapters) for step in steps_of(many)] == [3, 3, 1]
    seats = StepScheduler(sizes(max_sequences=4), 1, shares=True)
    seats.submit(0, 10, 0, range(7))
    assert [step.work.sequences for step in steps_of(seats)] == [4, 3]


def test_what_the_cache_holds_is_not_computed_and_lets_a_check_go_ahead() -> None:
    scheduler = StepScheduler(sizes(step_tokens=50), 1, shares=True)
    scheduler.submit(0, 45, 0, (0,))
    scheduler.submit(1, 45, 40, (0,))
    first, second = steps_of(scheduler)
    assert first.answered == [(1, 1)] and second.answered == [(0, 1)]
    assert first.work.tokens + second.work.tokens == 45 + 1 + 5 + 1


def test_a_long_call_gives_way_after_a_quantum() -> None:
    """Rules of LoRAs beyond four full steps' tokens start behind a check that comes later."""
    scheduler = StepScheduler(sizes(step_tokens=10), 1, shares=False)
    scheduler.submit(0, 9, 0, range(8))
    scheduler.submit(1, 9, 0, (0,))
    answered = [step.answered[0][0] for step in steps_of(scheduler)]
    assert answered.index(1) == 4 and len(answered) == 9


def test_an_adapter_without_a_slot_is_copied_and_without_a_host_copy_read_too() -> None:
    slots = AdapterSlots(sizes(adapters=4, slots=2, host_adapters=4))
    used = [slots.use(adapters) for adapters in ({0, 1}, {2}, {2})]
    assert used == [(0, 0), (1, 0), (0, 0)]
    slots = AdapterSlots(sizes(adapters=4, slots=1, host_adapters=2))
    assert [slots.use({3}), slots.use({3})] == [(1, 1), (0, 0)]
    slots = AdapterSlots(sizes(adapters=3, slots=3, host_adapters=1))
    assert slots.use({0, 1, 2}) == (0, 0)


def test_the_adapter_asked_least_often_goes_first() -> None:
    slots = AdapterSlots(sizes(adapters=3, slots=2, host_adapters=3))
    for _ in range(8):
        slots.use({0})
    slots.use({1})
    slots.use({2})
    assert slots.use({0}) == (0, 0), "the popular one kept its slot"
    assert slots.in_slots_first((1, 2, 0)) == [2, 0, 1]
