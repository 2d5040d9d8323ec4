from __future__ import annotations

import argparse

import pytest

from serve.cluster.size import ReplicaRange


def test_a_number_is_fixed_and_a_range_is_not() -> None:
    for text, low, high in (("2", 2, 2), ("1-4", 1, 4)):
        size = ReplicaRange.parse(text)
        assert size == ReplicaRange(low, high) and size.is_fixed == (low == high)


@pytest.mark.parametrize("text", ["", "0", "4-1", "a", "1-", "-2", "1-2-3", "257", "0-2", "²"])
def test_what_is_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="got"):
        ReplicaRange.parse(text)
