"""When each of a call's requests starts, in virtual time."""

from __future__ import annotations

from serve.engine.fair_queue import FairQueue


def test_a_conversation_comes_in_one_turn_until_its_own_tokens_fill_a_quantum() -> None:
    queue = FairQueue(now=1000, quantum=100)
    starts = [queue.next("a", tokens=90, shared_tokens=60) for _ in range(8)]
    assert starts == [(1000, 90), *[(1000, 30)] * 3, *[(1100, 30)] * 3, (1200, 30)]


def test_what_shares_nothing_comes_a_quantum_later_for_each_quantum_before_it() -> None:
    queue = FairQueue(now=7, quantum=100)
    assert [queue.next("a", 60, 0) for _ in range(4)] == [(7, 60), (7, 60), (107, 60), (107, 60)]
