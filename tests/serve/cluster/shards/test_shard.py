"""A rule changes on all replicas or on none, and no check gets a mixture; which shard has which
rules, on how many replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.weights.card import load_card
from serve.cluster.shards.placement import place_for, placed, split
from serve.cluster.shards.shard import UNUSED_S, Shard
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots
from serve.engine.refusals import Overloaded, TooLate
from tests.serve.cluster.words_cluster import (
    LocalReplicas,
    as_json,
    asked,
    local_replicas,
    noted,
    p_of,
    trained,
)
from tests.serve.cluster.words_engine import BAD, save_words

Use = Callable[[Shard, LocalReplicas], Awaitable[None]]


def with_shard(folder: Path, use: Use, **options: Any) -> Snapshots:
    """A shard of two replicas that serves the rules in `folder`."""
    folders = trained(folder)
    (snapshots,) = noted(folder, folders)

    async def run() -> None:
        async with local_replicas(snapshots) as replicas:
            await use(Shard(replicas, snapshots, folders, **options), replicas)

    asyncio.run(run())
    return snapshots


async def p_of_all(shard: Shard, replicas: LocalReplicas) -> list[dict[str, float]]:
    """What each replica says of each rule, asked by the version that is served."""
    answers = []
    for replica in replicas.replicas:
        answers.append(p_of(as_json(await replica.ask(asked("a"), shard.version))))
    return answers


def test_what_one_replica_refuses_is_served_by_none(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        before, card = await p_of_all(shard, replicas), shard.cards["manners"]

        async def refuses(match: str) -> None:
            with pytest.raises(GuardError, match=match):
                await shard.serve("manners")
            assert {replica.version for replica in replicas.replicas} == {shard.version}
            assert await p_of_all(shard, replicas) == before
            assert shard.cards["manners"] == card

        async def refuse(*_: object) -> None:
            raise GuardError("no memory is left for it")

        second = replicas.replicas[1]
        serve = second.service.serve
        second.service.serve = refuse  # type: ignore[method-assign,assignment]
        save_words(tmp_path / "manners", b"second")
        await refuses(r"replica-1: no memory is left")
        second.service.serve = serve  # type: ignore[method-assign]
        there, replicas.replicas = replicas.replicas, []
        with pytest.raises(GuardError, match="no replica is there"):
            await shard.serve("manners")
        replicas.replicas = there
        save_words(tmp_path / "manners", BAD)
        await refuses("bad")
        (tmp_path / "manners" / "adapter_model.safetensors").write_bytes(b"half")
        await refuses("not those of the card")

    with_shard(tmp_path, use)


def test_copies_that_have_not_been_served_for_a_day_are_deleted_with_the_next_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def copies() -> set[Path]:
        return {path for path in (tmp_path / "served").iterdir() if path.is_dir()}

    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        async def change(weights: bytes) -> None:
            save_words(tmp_path / "manners", weights)
            await shard.serve("manners")

        first = copies()
        with pytest.raises(GuardError, match="bad"):
            await change(BAD)
        refused = copies() - first
        await change(b"second")
        assert len(refused) == 1 and refused | first < copies() and len(copies()) == 4
        second = copies() - first - refused
        killed = tmp_path / "served" / ".copy-of-a-killed-process"
        killed.mkdir()
        for path in copies():
            os.utime(path, (time.time() - 2 * UNUSED_S,) * 2)
        await change(b"third")
        assert second < copies() and len(copies()) == 3  # it was served until now
        assert len(first & copies()) == 1 and not refused & copies()
        await change(b"second")
        assert second < copies() and len(copies()) == 3
        (tmp_path / "served/other.json").write_text("half a no")
        await change(b"fourth")  # that the copies stay is no failure of this
        assert "could not be deleted" in caplog.text
        assert (await p_of_all(shard, replicas))[0].keys() == shard.cards.keys()

    with_shard(tmp_path, use)


async def until_held(shard: Shard) -> None:
    """Wait until a change holds new checks."""
    with pytest.raises(TooLate):
        async with asyncio.timeout(60):
            while True:
                async with shard.answering(0.05):
                    await asyncio.sleep(0.005)


def test_new_checks_wait_for_a_change_which_waits_for_those_under_way(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        before, (p_before, _) = shard.version, await p_of_all(shard, replicas)
        save_words(tmp_path / "manners", b"second")
        async with shard.answering(5) as version:
            changing = asyncio.create_task(shard.serve("manners"))
            await until_held(shard)
            assert version == before == shard.version
            assert not changing.done()
        assert await changing == shard.cards["manners"]
        async with shard.answering(60) as version:
            assert version == shard.version != before
        first, second = await p_of_all(shard, replicas)
        assert first == second != p_before

    snapshots = with_shard(tmp_path, use)
    assert load_card(snapshots.read()["manners"]) == load_card(tmp_path / "manners")


def test_a_change_is_put_off_where_checks_under_way_take_half_of_their_time(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        async with shard.answering(60) as version:
            with pytest.raises(Overloaded, match=r"did not end within 0\.05 s"):
                await shard.remove("manners")
            async with shard.answering(0.05) as later:  # checks pass again
                assert later == shard.version == version

    with_shard(tmp_path, use, timeout_s=0.1)


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
