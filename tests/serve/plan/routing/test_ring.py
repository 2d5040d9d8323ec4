from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from serve.plan.routing.ring import HashRing, RoundRobin

SESSIONS = [
    int(number) for number in np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
]


def owners(ring: HashRing) -> dict[int, int]:
    return {session: ring.ranked(session)[0] for session in SESSIONS}


def test_a_session_has_one_replica_and_two_others_to_fall_back_on() -> None:
    ring = HashRing(list(range(10)))
    for session in SESSIONS[:100]:
        ranked = ring.ranked(session)
        assert ranked == ring.ranked(session) and len(set(ranked)) == 3
    assert len(HashRing([1, 2]).ranked(SESSIONS[0])) == 2, "no more than there are"


def test_sessions_are_spread_about_evenly() -> None:
    counts = Counter(owners(HashRing(list(range(20)))).values())
    assert len(counts) == 20
    assert max(counts.values()) < 1.4 * len(SESSIONS) / 20


def test_a_replica_that_leaves_moves_its_own_sessions_alone_to_their_fallbacks() -> None:
    ring = HashRing(list(range(20)))
    before = owners(ring)
    second = {session: ring.ranked(session)[1] for session in SESSIONS}
    ring.remove(7)
    after = owners(ring)
    for session in SESSIONS:
        assert after[session] == (second[session] if before[session] == 7 else before[session])
    ring.add(7)
    assert owners(ring) == before, "who comes back has what it had"


def test_a_replica_that_joins_takes_its_share_and_moves_no_other() -> None:
    ring = HashRing(list(range(20)))
    before = owners(ring)
    ring.add(20)
    after = owners(ring)
    moved = [session for session in SESSIONS if after[session] != before[session]]
    assert {after[session] for session in moved} == {20}
    assert len(moved) / len(SESSIONS) == pytest.approx(1 / 21, rel=0.4)


def test_round_robin_asks_one_after_the_other_whatever_the_session() -> None:
    router = RoundRobin([0, 1, 2, 3])
    assert [router.ranked(5)[0] for _ in range(5)] == [1, 2, 3, 0, 1]
    router.remove(2)
    router.add(9)
    assert {router.ranked(5)[0] for _ in range(8)} == {0, 1, 3, 9}
    assert len(router.ranked(5)) == 3
