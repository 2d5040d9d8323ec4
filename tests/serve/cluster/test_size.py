from __future__ import annotations

import argparse

import pytest

from serve.cluster.size import ReplicaRange, threads_each


def test_a_number_is_fixed_and_a_range_is_not() -> None:
    assert ReplicaRange.parse("2") == ReplicaRange(2, 2)
    assert ReplicaRange.parse("2").is_fixed
    assert ReplicaRange.parse("1-4") == ReplicaRange(1, 4)
    assert not ReplicaRange.parse("1-4").is_fixed


@pytest.mark.parametrize("text", ["", "0", "4-1", "a", "1-", "-2", "1-2-3", "257", "0-2", "²"])
def test_what_is_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="got"):
        ReplicaRange.parse(text)


def test_replicas_share_the_cores_and_each_has_one_thread_at_least() -> None:
    assert threads_each(16, 4) == 4
    assert threads_each(2, 2) == 1
    assert threads_each(2, 3) == 1
