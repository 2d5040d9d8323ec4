"""A rule changes on all replicas or on none, and no check gets a mixture."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.cluster.messages import RelayedRequest
from serve.cluster.pool import ReplicaLost
from serve.cluster.shards.shard_rules import UNUSED_S, ShardRules
from serve.cluster.snapshots import Snapshots, version_of
from serve.engine.refusals import Overloaded, TooLate
from tests.serve.cluster.words_cluster import (
    LocalReplicas,
    as_json,
    body,
    kept,
    local_replicas,
    trained,
)
from tests.serve.cluster.words_engine import BAD, save_words

JSON = ((b"content-type", b"application/json"),)
Use = Callable[[ShardRules, LocalReplicas], Awaitable[None]]


def with_rules(folder: Path, use: Use, **options: Any) -> None:
    """Two replicas that serve what is in `folder`, and the rules that they share."""

    async def run() -> None:
        folders = trained(folder)
        snapshots = kept(Snapshots(folder / "served"), folders)
        async with local_replicas(snapshots) as replicas:
            await use(ShardRules(replicas, snapshots, folders, **options), replicas)

    asyncio.run(run())


async def p_of_all(rules: ShardRules, replicas: LocalReplicas) -> list[dict[str, float]]:
    """What each replica says of each rule, asked by the version that is served."""
    answers = []
    text = json.dumps(body("a")).encode()
    for replica in replicas.replicas:
        relayed = RelayedRequest("POST", "/v1/check", headers=JSON, body=text)
        results: Any = as_json(await replica.ask(relayed, rules.version))["results"]
        answers.append({result["rule"]: result["p_violation"] for result in results})
    return answers


def test_a_rule_that_was_trained_again_changes_on_all_replicas(tmp_path: Path) -> None:
    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        before = rules.cards["manners"]
        (p_before, _) = await p_of_all(rules, replicas)
        save_words(tmp_path / "manners", b"second")
        assert await rules.serve("manners") == rules.cards["manners"] != before
        first, second = await p_of_all(rules, replicas)
        assert first == second != p_before
        assert {replica.version for replica in replicas.replicas} == {rules.version}
        assert version_of(Snapshots(tmp_path / "served").read()) == rules.version

    with_rules(tmp_path, use)


def test_what_one_replica_refuses_is_served_by_none(tmp_path: Path) -> None:
    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        before, card = await p_of_all(rules, replicas), rules.cards["manners"]
        second = replicas.replicas[1]

        async def refuse(*_: object) -> None:
            raise GuardError("no memory is left for it")

        serve = second.service.serve
        second.service.serve = refuse  # type: ignore[method-assign,assignment]
        save_words(tmp_path / "manners", b"second")
        with pytest.raises(GuardError, match=r"replica-1: no memory is left"):
            await rules.serve("manners")
        second.service.serve = serve  # type: ignore[method-assign]
        assert {replica.version for replica in replicas.replicas} == {rules.version}
        assert await p_of_all(rules, replicas) == before
        assert rules.cards["manners"] == card
        save_words(tmp_path / "manners", BAD)
        with pytest.raises(GuardError, match="bad"):
            await rules.serve("manners")
        (tmp_path / "manners" / "adapter_model.safetensors").write_bytes(b"half")
        with pytest.raises(GuardError, match="not those of the card"):
            await rules.serve("manners")
        assert await p_of_all(rules, replicas) == before

    with_rules(tmp_path, use)


def test_copies_that_have_not_been_served_for_a_day_are_deleted_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def copies() -> set[Path]:
        return {path for path in (tmp_path / "served").iterdir() if path.is_dir()}

    def grow_old(paths: set[Path]) -> None:
        for path in paths:
            os.utime(path, (time.time() - 2 * UNUSED_S,) * 2)

    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        first = copies()
        save_words(tmp_path / "manners", BAD)
        with pytest.raises(GuardError, match="bad"):
            await rules.serve("manners")
        refused = copies() - first
        save_words(tmp_path / "manners", b"second")
        await rules.serve("manners")
        assert len(refused) == 1 and refused | first < copies() and len(copies()) == 4
        second = copies() - first - refused
        grow_old(copies())
        save_words(tmp_path / "manners", b"third")
        await rules.serve("manners")
        assert second < copies() and len(copies()) == 3  # it was served until now
        assert len(first & copies()) == 1 and not refused & copies()
        save_words(tmp_path / "manners", b"second")
        await rules.serve("manners")
        assert second < copies() and len(copies()) == 3
        (tmp_path / "served/other.json").write_text("half a no")
        save_words(tmp_path / "manners", b"fourth")
        await rules.serve("manners")  # that the copies stay is no failure of this
        assert "could not be deleted" in caplog.text
        assert (await p_of_all(rules, replicas))[0].keys() == rules.cards.keys()

    with_rules(tmp_path, use)


def test_rules_come_and_go_on_all_replicas_but_for_the_last(tmp_path: Path) -> None:
    found = {"tact": save_words(tmp_path / "tact", b"third")}

    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        with pytest.raises(HTTPException) as refusal:
            await rules.serve("unknown")
        assert refusal.value.status_code == 404
        await rules.serve("tact")
        assert {len(answer) for answer in await p_of_all(rules, replicas)} == {3}
        assert rules.folder("tact") == found["tact"]
        await rules.remove("tact")
        await rules.remove("manners")
        assert {len(answer) for answer in await p_of_all(rules, replicas)} == {1}
        with pytest.raises(GuardError, match="served from no folder"):
            rules.folder("tact")
        with pytest.raises(HTTPException) as refusal:
            await rules.remove("greeting")
        assert refusal.value.status_code == 409

    with_rules(tmp_path, use, find_trained=found.get)


async def until_held(rules: ShardRules) -> None:
    """Wait until a change holds new checks."""
    with pytest.raises(TooLate):
        async with asyncio.timeout(60):
            while True:
                async with rules.answering(0.05):
                    await asyncio.sleep(0.005)


def test_new_checks_wait_for_a_change_which_waits_for_those_under_way(tmp_path: Path) -> None:
    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        before = rules.version
        save_words(tmp_path / "manners", b"second")
        async with rules.answering(5) as version:
            changing = asyncio.create_task(rules.serve("manners"))
            await until_held(rules)
            assert version == before == rules.version
            assert not changing.done()
        await changing
        async with rules.answering(60) as version:
            assert version == rules.version != before

    with_rules(tmp_path, use)


def test_a_change_is_put_off_where_checks_under_way_take_half_of_their_time(tmp_path: Path) -> None:
    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        async with rules.answering(60) as version:
            with pytest.raises(Overloaded, match=r"did not end within 0\.05 s"):
                await rules.remove("manners")
        assert rules.version == version

    with_rules(tmp_path, use, timeout_s=0.1)


def test_without_replicas_nothing_changes(tmp_path: Path) -> None:
    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        gone, replicas.replicas = replicas.replicas, []
        version = rules.version
        save_words(tmp_path / "manners", b"second")
        with pytest.raises(GuardError, match="no replica is there"):
            await rules.serve("manners")
        assert rules.version == version
        with pytest.raises(ReplicaLost):
            await replicas.each("ready", within_s=1)
        replicas.replicas = gone

    with_rules(tmp_path, use)


def test_a_replica_that_starts_after_a_change_serves_what_the_others_do(tmp_path: Path) -> None:
    async def use(rules: ShardRules, replicas: LocalReplicas) -> None:
        save_words(tmp_path / "manners", b"second")
        await rules.serve("manners")
        save_words(tmp_path / "manners", b"third")  # in the folder, and not served
        async with local_replicas(Snapshots(tmp_path / "served"), 1) as late:
            assert late.replicas[0].version == rules.version
            replicas.replicas += late.replicas
            answers = await p_of_all(rules, replicas)
            assert answers[0] == answers[1] == answers[2]
            replicas.replicas.pop()

    with_rules(tmp_path, use)
