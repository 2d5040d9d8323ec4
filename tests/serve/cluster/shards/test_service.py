"""Two shards in this process: their answers are one server's, and what a shard does not answer is
unjudged. A rule changes on its shard alone, and a new one comes to the shard that has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.weights.card import load_card
from serve.api.app import create_app
from serve.api.observe.audit import AuditLog
from serve.cluster.messages import RelayedCheck, ReplicaAnswer, ReplicaLost
from serve.cluster.shards.service import ClusterService
from serve.engine.codes import Code
from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.cluster.words_cluster import (
    REPLICA,
    SIX_RULES,
    LocalCluster,
    LocalReplicas,
    body,
    local_replicas,
    noted,
    rules_on,
    sharded,
    tenants_of,
    trained,
)
from tests.serve.cluster.words_engine import BAD, BREAKS, SLOWLY, WordsEngine, save_words, words
from tests.serve.serving import serving, waiting_caller
from tests.waiting import wait_until

FIRST, SECOND = rules_on(0), rules_on(1)
PAIR = (FIRST[0], SECOND[0])
SETS = {
    "both": RuleSet(PAIR, parse({"all_of": list(PAIR)}, "test"), "both"),
    "either": RuleSet(PAIR, parse({"any_of": list(PAIR)}, "test"), "either"),
}
SAID = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": f"This {BREAKS} {FIRST[1]}."},
    {"role": "user", "content": f"And this {BREAKS} {SECOND[1]}."},
]
LITELLM = "/beta/litellm_basic_guardrail_api"
REQUESTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("/v1/check", {"messages": SAID}),
    ("/v1/check", {"messages": SAID, "explain": True}),
    ("/v1/check", {"messages": SAID, "rules": [SECOND[1], FIRST[0]]}),
    ("/v1/check", {"messages": SAID, "rules": [SECOND[0]]}),
    ("/v1/check", {"messages": SAID, "rule_set": "either"}),
    ("/v1/check/turns", {"messages": SAID}),
    ("/v1/check/turns", {"messages": SAID, "since": 2}),
    (LITELLM, {"input_type": "request", "structured_messages": SAID, "request_data": {}}),
    ("/v1/check", {"messages": []}),
    ("/v1/check", {"messages": SAID, "rules": ["unknown"]}),
)


def two_shards(root: Path, **options: Any) -> LocalCluster:
    return LocalCluster(root, SIX_RULES, shards=2, **options)


def without_its_own(answer: Any) -> Any:
    """The answer without what no two have alike."""
    if isinstance(answer, dict):
        return {key: without_its_own(answer[key]) for key in answer if key != "latency_ms"}
    if isinstance(answer, list):
        return [without_its_own(part) for part in answer]
    return answer


def test_a_check_is_answered_as_by_one_server_that_has_all_rules(tmp_path: Path) -> None:
    cluster = two_shards(tmp_path, rule_sets=SETS)
    one_server = create_app(WordsEngine(cluster.folders), 10.0, rule_sets=SETS)
    with cluster.client() as client, serving(one_server) as alone:
        for path, content in REQUESTS:
            answers = [server.post(path, json=content) for server in (client, alone)]
            assert answers[0].status_code == answers[1].status_code, content
            sharded, whole = (without_its_own(answer.json()) for answer in answers)
            assert sharded == whole, content
        assert client.get("/v1/rules").json() == alone.get("/v1/rules").json()
        probes = {"/healthz", "/readyz", "/health", "/metrics"}
        described, expected = (server.get("/openapi.json").json() for server in (client, alone))
        assert described["paths"].keys() >= expected["paths"].keys() - probes


def test_only_the_shards_of_the_rules_are_asked_and_each_by_the_same_session(
    tmp_path: Path,
) -> None:
    cluster = two_shards(tmp_path)
    first, second = cluster.pools
    with cluster.client() as client:
        said = [{"role": "user", "content": f"turn {turn}"} for turn in range(3)]
        places = set()
        for turns in (1, 3):
            answer = client.post("/v1/check", json={"messages": said[:turns]})
            places.add(answer.headers[REPLICA])
        assert len(places) == len({*first.keys, *second.keys}) == 1
        client.post("/v1/check", json={"messages": said, "rules": FIRST})
        assert (len(first.keys), len(second.keys)) == (3, 2)
        for number in range(3):
            session = {"x-session-id": "mine"}
            client.post("/v1/check", json=body(f"text {number}"), headers=session)
        assert len(set(first.keys)) == 2


def test_a_lost_shard_has_unjudged_rules_and_the_others_verdicts_stand(tmp_path: Path) -> None:
    cluster = two_shards(tmp_path, rule_sets=SETS)
    with cluster.client() as client:
        cluster.pools[1].replicas = []

        def verdict(text: str, **more: Any) -> str:
            return str(client.post("/v1/check", json=body(text) | more).json()["verdict"])

        answer = client.post("/v1/check", json=body("Hello."))
        assert answer.status_code == 200
        content = answer.json()
        assert content["verdict"] == "unjudged" and content["decided_by"] == sorted(SECOND)
        assert [result["rule"] for result in content["results"]] == FIRST
        unjudged = {rule["rule"]: rule["reason"] for rule in content["unjudged"]}
        assert sorted(unjudged) == SECOND and set(unjudged.values()) == {"no replica is there"}
        assert content["usage"] == {"cached_tokens": 9, "computed_tokens": 6}
        assert verdict(f"{BREAKS} {FIRST[0]}") == "violation"
        # By three-valued logic: an allow of one is enough against "all of", and no more than that.
        assert verdict("Hello.", rule_set="both") == "allow"
        assert verdict("Hello.", rule_set="either") == "unjudged"
        # What has no word for "unjudged" beside verdicts has no answer at all.
        assert client.post("/v1/moderations", json={"input": "a"}).status_code == 422
        assert client.get("/readyz").status_code == client.get("/healthz").status_code == 200
        metrics = client.get("/metrics").text
        assert 'guard_shard_replicas{shard="0"} 2.0' in metrics
        assert 'guard_shard_replicas{shard="1"} 0.0' in metrics
        assert "guard_replicas 2.0" in metrics and "guard_rules_served 6.0" in metrics
        assert f'guard_verdicts_total{{rule="{SECOND[0]}",verdict="unjudged"}} 5.0' in metrics
        lost = client.post("/v1/check", json=body("Hello.", *SECOND))
        assert (lost.status_code, lost.json()["verdict"]) == (503, "unjudged")
        cluster.pools[0].replicas = []
        gone = client.post("/v1/check", json=body("Hello."))
        assert (gone.status_code, gone.json()["verdict"]) == (503, "unjudged")
        assert gone.headers["retry-after"] == "1"
        assert client.get("/readyz").status_code == 503
        metrics = client.get("/metrics").text
        assert 'guard_request_seconds_count{format="check",status="503"} 2.0' in metrics


def test_nothing_more_of_a_stream_is_released_once_a_shard_is_lost(tmp_path: Path) -> None:
    cluster = two_shards(tmp_path)
    messages = [{"role": "user", "content": "Tell me."}]
    opening = {"messages": messages, "every_tokens": 2, "hold_back": 0}

    async def use(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        first = await stream.read()
        assert first["release"] == "The sea is wide."
        assert len(first["p_violation"]) == len(SIX_RULES)
        cluster.pools[1].replicas = []
        stream.write({"append": " And deep."})
        event = await stream.read()
        assert (event["release"], event["verdict"]) == ("", "unjudged")
        stream.write({"end": True})
        (last,) = await stream.rest()
        assert last["judgement"]["verdict"] == "unjudged" and last["release"] == ""
        assert len(last["judgement"]["results"]) == len(FIRST)

    with cluster.client() as client:
        streamed(client, opening, use)


def test_a_shard_that_is_late_or_gone_is_unjudged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The caller's time bounds the wait, and not this.
    monkeypatch.setattr("serve.cluster.shards.service.CLOSING_S", 120.0)
    cluster = two_shards(tmp_path)

    async def hangs(*_: object) -> ReplicaAnswer:
        await asyncio.sleep(300)
        raise ReplicaLost("too late")

    with cluster.client() as client:

        def check(*rules: str, **headers: str) -> httpx.Response:
            return client.post("/v1/check", json=body("Hello.", *rules), headers=headers)

        cluster.pools[1].check = hangs  # type: ignore[method-assign]
        late = check(**{"guard-timeout-ms": "1000"}).json()
        assert [result["rule"] for result in late["results"]] == FIRST
        assert "too long" in late["unjudged"][0]["reason"]
        cluster.pools[1].replicas = []
        gone = check(*SECOND)  # they may have died of it
        assert "no replica is there" in gone.text and "retry-after" not in gone.headers
        unasked = check(*SECOND)
        assert "no replica is there" in unasked.text and unasked.headers["retry-after"] == "1"


@pytest.mark.parametrize("failure", ["engine_failed", "too_late", "overloaded"])
def test_a_shard_s_failure_is_told_and_counted_as_one_server_s(
    tmp_path: Path, failure: Code
) -> None:
    cluster = two_shards(tmp_path)
    answer = ReplicaAnswer("a replica", error="not now", code=failure, retry_after_s=2.0)

    async def failed(*_: object) -> ReplicaAnswer:
        return answer

    with cluster.client() as client:
        cluster.pools[1].check = failed  # type: ignore[method-assign]
        content = client.post("/v1/check", json=body("Hello.")).json()
        assert {rule["reason"] for rule in content["unjudged"]} == {"not now"}
        refused = client.post("/v1/check", json=body("Hello.", *SECOND))
        assert refused.status_code == 503
        # Who has just failed would do so again.
        assert refused.headers.get("retry-after") == ("2" if failure == "overloaded" else None)
        counts = client.get("/metrics").text
        assert f'guard_check_failures_total{{code="{failure}"}} 1.0' in counts


@pytest.mark.parametrize("shards", [1, 2])
def test_a_caller_who_is_gone_is_not_waited_for(tmp_path: Path, shards: int) -> None:
    cluster = LocalCluster(tmp_path, SIX_RULES, shards=shards, timeout_s=60.0)
    events: list[str] = []

    async def hangs(*_: object) -> Any:
        events.append("asked")
        try:
            await asyncio.sleep(120)
        finally:
            events.append("cancelled")

    with cluster.client() as client:
        for pool in cluster.pools:
            pool.ask = pool.check = hangs  # type: ignore[method-assign]
        with waiting_caller(client, "/v1/check", body("a")):
            wait_until(lambda: events == ["asked"] * shards)
        wait_until(lambda: events.count("cancelled") == shards, 20)  # by itself in a minute
        if shards > 1:
            gone = 'guard_check_failures_total{code="caller_gone"} 1.0'
            wait_until(lambda: gone in client.get("/metrics").text)


def test_tenants_are_told_apart_and_their_checks_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that all have come before one is answered, on a busy machine too.
    monkeypatch.setattr("tests.serve.cluster.words_engine.SLOW_S", 2.0)
    audit = tmp_path / "audit.jsonl"
    tenants = tenants_of(tmp_path, SETS, shop="both", bank="either")
    cluster = two_shards(tmp_path, rule_sets=SETS, tenants=tenants, observers=[AuditLog(audit)])
    shop, bank = {"x-api-key": "shop"}, {"x-api-key": "bank"}
    salts: list[str | None] = []
    check = cluster.pools[0].check

    async def salted(relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
        salts.append(relayed.cache_salt)
        return await check(relayed, key, version)

    cluster.pools[0].check = salted  # type: ignore[method-assign]
    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        assert client.post("/v1/check", json=body("a")).status_code == 401
        asked = body("a") | {"rule_set": "either"}
        assert client.post("/v1/check", json=asked, headers=shop).status_code == 422
        assert client.post("/v1/check", json=asked, headers=bank).status_code == 200
        both = body("a") | {"rule_set": "both"}
        assert client.post("/v1/check", json=both, headers=shop).status_code == 200
        assert len(set(cluster.pools[0].keys)) == 2  # the same words of two tenants
        assert [str(salt).partition("/")[0] for salt in salts] == ["bank", "shop"]
        assert client.get("/metrics", headers=shop).status_code == 403
        assert client.get("/metrics", headers={"x-api-key": "admin"}).status_code == 200
        assert client.post(f"/admin/rules/{FIRST[0]}", headers=shop).status_code == 403
        slowly = body(SLOWLY) | {"rule_set": "both"}
        futures = [
            pool.submit(client.post, "/v1/check", json=slowly, headers=shop) for _ in range(8)
        ]
        statuses = [future.result().status_code for future in futures]
        assert statuses.count(200) == 2 and statuses.count(429) == 6
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["tenant"] for line in lines] == ["bank", "shop", "shop", "shop"]
    assert [rule["rule"] for rule in lines[0]["rules"]] == list(SETS["either"].rules)
    assert all(rule["version"] for rule in lines[0]["rules"])


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


def test_a_rule_that_is_trained_again_changes_on_its_shard_alone_and_its_last_stays(
    tmp_path: Path,
) -> None:
    async def use(rules: ClusterService, pools: list[LocalReplicas]) -> None:
        rule, *others = rules_on(1)
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
        for other in others:
            await rules.remove(other)
        with pytest.raises(HTTPException, match="last rule of its shard") as refusal:
            await rules.remove(rule)
        assert refusal.value.status_code == 409 and rule in rules.cards

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
        with pytest.raises(GuardError, match="two shards have the rule"):
            ClusterService([rules.shards[0], *rules.shards], words)

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
