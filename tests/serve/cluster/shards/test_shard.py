"""A rule changes on all replicas or on none, and no check gets a mixture."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.cluster.shards.shard import UNUSED_S, Gate, Shard
from serve.cluster.snapshots import Snapshots, version_of
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


def test_a_rule_that_was_trained_again_changes_on_all_replicas(tmp_path: Path) -> None:
    versions: list[str] = []

    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        before = shard.cards["manners"]
        (p_before, _) = await p_of_all(shard, replicas)
        save_words(tmp_path / "manners", b"second")
        assert await shard.serve("manners") == shard.cards["manners"] != before
        first, second = await p_of_all(shard, replicas)
        assert first == second != p_before
        assert {replica.version for replica in replicas.replicas} == {shard.version}
        versions.append(shard.version)

    assert versions == [version_of(with_shard(tmp_path, use).read())]


def test_what_one_replica_refuses_is_served_by_none(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        before, card = await p_of_all(shard, replicas), shard.cards["manners"]
        second = replicas.replicas[1]

        async def refuse(*_: object) -> None:
            raise GuardError("no memory is left for it")

        serve = second.service.serve
        second.service.serve = refuse  # type: ignore[method-assign,assignment]
        save_words(tmp_path / "manners", b"second")
        with pytest.raises(GuardError, match=r"replica-1: no memory is left"):
            await shard.serve("manners")
        second.service.serve = serve  # type: ignore[method-assign]
        assert {replica.version for replica in replicas.replicas} == {shard.version}
        assert await p_of_all(shard, replicas) == before
        assert shard.cards["manners"] == card
        save_words(tmp_path / "manners", BAD)
        with pytest.raises(GuardError, match="bad"):
            await shard.serve("manners")
        (tmp_path / "manners" / "adapter_model.safetensors").write_bytes(b"half")
        with pytest.raises(GuardError, match="not those of the card"):
            await shard.serve("manners")
        assert await p_of_all(shard, replicas) == before

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


def test_rules_come_and_go_on_all_replicas_but_for_the_last(tmp_path: Path) -> None:
    found = {"tact": save_words(tmp_path / "tact", b"third")}

    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        with pytest.raises(HTTPException) as refusal:
            await shard.serve("unknown")
        assert refusal.value.status_code == 404
        await shard.serve("tact")
        assert {len(answer) for answer in await p_of_all(shard, replicas)} == {3}
        assert shard.folder("tact") == found["tact"]
        await shard.remove("tact")
        await shard.remove("manners")
        assert {len(answer) for answer in await p_of_all(shard, replicas)} == {1}
        with pytest.raises(GuardError, match="served from no folder"):
            shard.folder("tact")
        with pytest.raises(HTTPException) as refusal:
            await shard.remove("greeting")
        assert refusal.value.status_code == 409

    with_shard(tmp_path, use, find_trained=found.get)


async def until_held(shard: Shard) -> None:
    """Wait until a change holds new checks."""
    with pytest.raises(TooLate):
        async with asyncio.timeout(60):
            while True:
                async with shard.answering(0.05):
                    await asyncio.sleep(0.005)


def test_new_checks_wait_for_a_change_which_waits_for_those_under_way(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        before = shard.version
        save_words(tmp_path / "manners", b"second")
        async with shard.answering(5) as version:
            changing = asyncio.create_task(shard.serve("manners"))
            await until_held(shard)
            assert version == before == shard.version
            assert not changing.done()
        await changing
        async with shard.answering(60) as version:
            assert version == shard.version != before

    with_shard(tmp_path, use)


def test_a_change_is_put_off_where_checks_under_way_take_half_of_their_time(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        async with shard.answering(60) as version:
            with pytest.raises(Overloaded, match=r"did not end within 0\.05 s"):
                await shard.remove("manners")
        assert shard.version == version
        async with shard.answering(0.05):  # checks pass again
            pass

    with_shard(tmp_path, use, timeout_s=0.1)


def test_without_replicas_nothing_changes(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        gone, replicas.replicas = replicas.replicas, []
        version = shard.version
        save_words(tmp_path / "manners", b"second")
        with pytest.raises(GuardError, match="no replica is there"):
            await shard.serve("manners")
        assert shard.version == version
        replicas.replicas = gone

    with_shard(tmp_path, use)


def test_a_replica_that_starts_after_a_change_serves_what_the_others_do(tmp_path: Path) -> None:
    async def use(shard: Shard, replicas: LocalReplicas) -> None:
        save_words(tmp_path / "manners", b"second")
        await shard.serve("manners")
        save_words(tmp_path / "manners", b"third")  # in the folder, and not served
        async with local_replicas(shard._snapshots, 1) as late:
            assert late.replicas[0].version == shard.version
            replicas.replicas += late.replicas
            answers = await p_of_all(shard, replicas)
            assert answers[0] == answers[1] == answers[2]
            replicas.replicas.pop()

    with_shard(tmp_path, use)


def test_whoever_comes_while_it_is_closed_waits_and_those_inside_end_first() -> None:
    order: list[str] = []

    async def check(gate: Gate, name: str, seconds: float) -> None:
        async with gate.passing(5):
            order.append(f"{name} in")
            await asyncio.sleep(seconds)
            order.append(f"{name} out")

    async def change(gate: Gate) -> None:
        async with gate.closed(5):
            order.append("changed")
            await asyncio.sleep(0.05)

    async def run() -> None:
        gate = Gate()
        first = asyncio.create_task(check(gate, "first", 0.1))
        await asyncio.sleep(0.02)
        changing = asyncio.create_task(change(gate))
        await asyncio.sleep(0.02)
        await asyncio.gather(first, changing, check(gate, "second", 0.0))

    asyncio.run(run())
    assert order == ["first in", "first out", "changed", "second in", "second out"]


def test_nobody_waits_too_long_and_a_change_that_gives_up_opens_the_gate_again() -> None:
    async def run() -> None:
        gate = Gate()
        async with gate.passing(5):
            with pytest.raises(TimeoutError):
                async with gate.closed(0.05):
                    pytest.fail("somebody is inside")
            async with gate.passing(0.05):
                pass
        async with gate.closed(5):
            with pytest.raises(TimeoutError):
                async with gate.passing(0.05):
                    pytest.fail("it is closed")
        async with gate.closed(0.05):  # whoever gave up is not inside
            pass

    asyncio.run(run())
