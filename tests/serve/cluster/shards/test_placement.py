from __future__ import annotations

import argparse
import collections
import random
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.cluster.shards.placement import place_for, placed, split
from serve.cluster.size import ReplicaRange


def names(count: int) -> list[str]:
    return [f"rule_{number}" for number in range(count)]


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (7, 2), (9, 4), (5, 5), (100, 7)])
def test_every_shard_has_as_many_rules_as_any_other_or_one_more(count: int, shards: int) -> None:
    sizes = collections.Counter(placed(names(count), shards).values())
    assert set(sizes) == set(range(shards))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_a_rule_is_placed_by_its_name_and_not_by_the_order() -> None:
    rules = names(50)
    placement = placed(rules, 4)
    random.Random(0).shuffle(rules)
    assert placed(rules, 4) == placement and list(placed(rules, 4)) == rules


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_one_more_rule_moves_few_others(shards: int) -> None:
    moved = 0
    for count in range(100, 140):
        before, after = placed(names(count), shards), placed(names(count + 1), shards)
        moved += sum(before[rule] != after[rule] for rule in before)
    # As many on each of k shards: by number modulo k, in the order of names, most would move.
    assert moved / 40 <= shards


def test_a_rule_that_comes_later_goes_where_there_is_room_and_moves_none() -> None:
    placement = placed(names(10), 3)
    counts = [list(placement.values()).count(shard) for shard in range(3)]
    for number in range(10, 40):
        shard = place_for(f"rule_{number}", counts, range(3))
        counts[shard] += 1
        assert max(counts) - min(counts) <= 2
    # Where few may take it, the emptiest of them.
    assert place_for("new", [9, 1, 2, 3], [0, 3]) == 3
    assert place_for("new", [1, 9, 9, 9], [1, 2]) in (1, 2)


def test_more_shards_than_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"2 rules cannot be split \(got 3\).*SHARDS="):
        placed(names(2), 3)
    folders = {rule: tmp_path / rule for rule in names(5)}
    parts = split(folders, 2)
    assert parts[0] | parts[1] == folders and sorted(map(len, parts)) == [2, 3]


def test_a_number_is_fixed_and_a_range_is_not() -> None:
    for text, low, high in (("2", 2, 2), ("1-4", 1, 4)):
        size = ReplicaRange.parse(text)
        assert size == ReplicaRange(low, high) and size.is_fixed == (low == high)


@pytest.mark.parametrize("text", ["", "0", "4-1", "a", "1-", "-2", "1-2-3", "257", "0-2", "²"])
def test_what_is_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="got"):
        ReplicaRange.parse(text)
