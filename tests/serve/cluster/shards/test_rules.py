"""A rule changes on its shard alone, and a new one comes to the shard that has room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.weights.card import load_card
from serve.cluster.shards.service import ClusterService
from tests.serve.cluster.words_cluster import (
    SIX_RULES,
    LocalReplicas,
    local_replicas,
    noted,
    rules_on,
    sharded,
    trained,
)
from tests.serve.cluster.words_engine import BAD, save_words, words

Use = Callable[[ClusterService, list[LocalReplicas]], Awaitable[None]]


def with_shards(root: Path, use: Use) -> None:
    """Two shards of two replicas each, used and closed."""

    async def run() -> None:
        folders = trained(root, SIX_RULES)
        snapshots = noted(root, folders, shards=2)
        async with contextlib.AsyncExitStack() as until_closed:
            pools: list[LocalReplicas] = []
            for served in snapshots:
                pools.append(await until_closed.enter_async_context(local_replicas(served)))
            await use(sharded(pools, snapshots, folders), pools)

    asyncio.run(run())


def served(pool: LocalReplicas) -> list[set[str]]:
    """What each replica of a shard serves."""
    return [set(replica.service.cards) for replica in pool.replicas]


def test_each_shard_serves_its_own_rules_and_they_are_listed_as_they_were_named(
    tmp_path: Path,
) -> None:
    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        assert tuple(rules.cards) == SIX_RULES
        for number, pool in enumerate(pools):
            assert served(pool) == [set(rules_on(number))] * 2
        assert rules.by_shard(reversed(SIX_RULES)) == {
            number: list(reversed(rules_on(number))) for number in (1, 0)
        }
        assert rules.by_shard(["unknown"]) == {}
        with pytest.raises(GuardError, match="two shards have the rule"):
            ClusterService([rules.shards[0], *rules.shards], words)

    with_shards(tmp_path, use)


def test_a_rule_that_is_trained_again_changes_on_its_shard_alone(tmp_path: Path) -> None:
    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        rule = rules_on(1)[0]
        versions = [shard.version for shard in rules.shards]
        save_words(tmp_path / rule, b"second")
        card = await rules.serve(rule)
        assert rules.cards[rule] == card == load_card(tmp_path / rule)
        for replica in pools[1].replicas:
            assert replica.service.cards[rule] == card
        assert rules.shards[0].version == versions[0]
        assert rules.shards[1].version != versions[1]
        save_words(tmp_path / rule, BAD)
        with pytest.raises(GuardError):
            await rules.serve(rule)
        assert rules.cards[rule] == card

    with_shards(tmp_path, use)


def test_a_new_rule_comes_to_one_shard_and_stays_there(tmp_path: Path) -> None:
    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        removed = rules_on(0)[0]
        await rules.remove(removed)
        assert removed not in rules.cards and rules.by_shard([removed]) == {}
        with pytest.raises(GuardError, match="no folder"):
            rules.folder(removed)
        with pytest.raises(HTTPException, match="not served"):
            await rules.remove(removed)
        save_words(tmp_path / "new", b"new")
        await rules.serve("new")  # where there is room now
        assert served(pools[0]) == [{*rules_on(0), "new"} - {removed}] * 2
        assert served(pools[1]) == [set(rules_on(1))] * 2
        assert rules.by_shard(["new"]) == {0: ["new"]} and list(rules.cards)[-1] == "new"
        assert rules.folder("new") == tmp_path / "new"
        with pytest.raises(HTTPException) as refusal:
            await rules.serve("unknown")
        assert refusal.value.status_code == 404
        save_words(tmp_path / "bad", BAD)
        with pytest.raises(GuardError):
            await rules.serve("bad")
        assert "bad" not in rules.cards and rules.by_shard(["bad"]) == {}

    with_shards(tmp_path, use)


def test_a_change_goes_on_though_whoever_asked_for_it_is_gone(tmp_path: Path) -> None:
    """Ray Serve cancels the task of a request whose sender has closed the connection."""

    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        have_switched, may_go_on = asyncio.Event(), asyncio.Event()

        async def each(self: LocalReplicas, *arguments: Any, **options: Any) -> Any:
            answers = await LocalReplicas.each(self, *arguments, **options)
            have_switched.set()
            await may_go_on.wait()
            return answers

        for pool in pools:
            pool.each = each.__get__(pool)  # type: ignore[method-assign]
        save_words(tmp_path / "new", b"new")
        asking = asyncio.create_task(rules.serve("new"))
        await have_switched.wait()
        asking.cancel()
        await asyncio.wait([asking])
        may_go_on.set()
        async with asyncio.timeout(60):
            while "new" not in rules.cards:
                await asyncio.sleep(0.01)
        for shard, pool in zip(rules.shards, pools, strict=True):
            assert {replica.version for replica in pool.replicas} == {shard.version}
        again = ClusterService(rules.shards, words, SIX_RULES)  # as an ingress that starts again
        assert tuple(again.cards) == (*SIX_RULES, "new")
        assert again.by_shard(["new"]) == rules.by_shard(["new"])
        assert again.by_shard(SIX_RULES) == {number: rules_on(number) for number in (0, 1)}

    with_shards(tmp_path, use)


def test_a_new_rule_comes_to_a_shard_that_has_its_base(tmp_path: Path) -> None:
    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        # Only the second shard has a rule on another base: it has one rule more, and gets the new.
        for number, rule in enumerate(("other", "third")):
            folder = save_words(tmp_path / rule, rule.encode())
            load_card(folder).model_copy(update={"model": "another"}).save(folder)
            if not number:
                await rules.shards[1].serve(rule)
        assert await rules.serve("third")
        assert rules.by_shard(["third"]) == {1: ["third"]}

    with_shards(tmp_path, use)


def test_the_last_rule_of_a_shard_stays(tmp_path: Path) -> None:
    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        *others, last = rules_on(0)
        for rule in others:
            await rules.remove(rule)
        with pytest.raises(HTTPException, match="last rule of its shard") as refusal:
            await rules.remove(last)
        assert refusal.value.status_code == 409 and last in rules.cards

    with_shards(tmp_path, use)
