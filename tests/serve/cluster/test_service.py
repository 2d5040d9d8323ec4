"""A rule changes on all replicas or on none, and no check gets a mixture. Streams are judged by the
replicas; what none answers is unjudged.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pytest import MonkeyPatch
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.weights.card import load_card
from serve.api.observe.audit import AuditLog
from serve.cluster.messages import RelayedCheck, ReplicaAnswer, ReplicaLost
from serve.cluster.note import ServedNote, version_card
from serve.cluster.service import ClusterService
from serve.engine.codes import Code
from serve.engine.refusals import Overloaded, TooLate
from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet
from serve.registry.rollout import Mode, Rollout, TakenBack, TrialVersion, trial_name
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.cluster.words_cluster import (
    RULES,
    LocalCluster,
    LocalReplicas,
    as_json,
    asked,
    body,
    local_replicas,
    noted,
    p_of,
    service_of,
    tenants_of,
    trained,
)
from tests.serve.cluster.words_engine import BAD, SLOWLY, VIOLATES, save_words, version
from tests.serve.found import Found
from tests.serve.serving import waiting_caller
from tests.waiting import wait_until

Use = Callable[[ClusterService, LocalReplicas], Awaitable[None]]
SETS = {
    "both": RuleSet(RULES, parse({"all_of": list(RULES)}, "test"), "both"),
    "either": RuleSet(RULES, parse({"any_of": list(RULES)}, "test"), "either"),
}


def with_service(folder: Path, use: Use, **options: Any) -> ServedNote:
    """Two replicas that serve the rules in `folder`."""
    folders = trained(folder)
    note = noted(folder, folders)

    async def run() -> None:
        async with local_replicas(note) as replicas:
            await use(service_of(replicas, note, folders, **options), replicas)

    asyncio.run(run())
    return note


async def p_of_all(service: ClusterService, replicas: LocalReplicas) -> list[dict[str, float]]:
    """What each replica says of each rule, asked by the version that is served."""
    answers = []
    for replica in replicas.replicas:
        answers.append(p_of(as_json(await replica.ask(asked("a"), service.version))))
    return answers


def test_what_one_replica_refuses_is_served_by_none(tmp_path: Path) -> None:
    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        before, card = await p_of_all(service, replicas), service.cards["manners"]

        async def refuses(match: str) -> None:
            with pytest.raises(GuardError, match=match):
                await service.serve("manners")
            assert {replica.version for replica in replicas.replicas} == {service.version}
            assert await p_of_all(service, replicas) == before
            assert service.cards["manners"] == card

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
            await service.serve("manners")
        replicas.replicas = there
        save_words(tmp_path / "manners", BAD)
        await refuses("bad")
        (tmp_path / "manners" / "adapter_model.safetensors").write_bytes(b"half")
        await refuses("not those of the card")

    with_service(tmp_path, use)


def test_weights_that_are_no_version_are_served_by_none(tmp_path: Path) -> None:
    """They could change before a replica that starts later reads them."""
    folder = save_words(tmp_path / "manners", b"second")

    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        before = await p_of_all(service, replicas)
        with pytest.raises(GuardError, match=r"versions .* alone.*Let runs/registry be written"):
            await service.serve("manners")
        switched = await replicas.replicas[0].switch("manners", Rollout(folder=folder))
        assert "these weights are none" in str(switched.error)
        assert await p_of_all(service, replicas) == before

    with_service(tmp_path, use, source=Found({"manners": folder}.get))
    second = version(folder)
    with pytest.raises(GuardError, match=r"not of the rule 'greeting'"):
        version_card("greeting", second)
    shutil.copytree(save_words(folder, b"third"), second, dirs_exist_ok=True)  # as no registry does
    with pytest.raises(GuardError, match="these weights are none"):
        version_card("manners", second)


async def until_held(service: ClusterService) -> None:
    """Wait until a change holds new checks."""
    with pytest.raises(TooLate):
        async with asyncio.timeout(60):
            while True:
                async with service.answering(0.05):
                    await asyncio.sleep(0.005)


def test_new_checks_wait_for_a_change_which_waits_for_those_under_way(tmp_path: Path) -> None:
    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        before, (p_before, _) = service.version, await p_of_all(service, replicas)
        save_words(tmp_path / "manners", b"second")
        async with service.answering(5) as version:
            changing = asyncio.create_task(service.serve("manners"))
            await until_held(service)
            assert version == before == service.version
            assert not changing.done()
        assert await changing == service.cards["manners"]
        async with service.answering(60) as version:
            assert version == service.version != before
        first, second = await p_of_all(service, replicas)
        assert first == second != p_before

    noted_folder = with_service(tmp_path, use).read()["manners"].folder
    assert load_card(noted_folder) == load_card(tmp_path / "manners")


def test_a_change_is_put_off_where_checks_under_way_take_half_of_their_time(tmp_path: Path) -> None:
    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        async with service.answering(60) as version:
            with pytest.raises(Overloaded, match=r"did not end within 0\.05 s"):
                await service.remove("manners")
            async with service.answering(0.05) as later:  # checks pass again
                assert later == service.version == version

    with_service(tmp_path, use, timeout_s=0.1)


def test_a_rule_comes_and_goes_and_the_last_one_stays(tmp_path: Path) -> None:
    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        await service.remove("manners")
        with pytest.raises(GuardError, match="no folder"):
            service.wanted("manners")
        for change in (service.remove("manners"), service.serve("unknown")):
            with pytest.raises(HTTPException) as refusal:
                await change
            assert refusal.value.status_code == 404
        with pytest.raises(HTTPException, match="last rule"):
            await service.remove("greeting")
        save_words(tmp_path / "new", b"new")
        await service.serve("new")
        for replica in replicas.replicas:
            assert set(replica.service.cards) == set(service.cards) == {"greeting", "new"}
        assert service.wanted("new").folder == version(tmp_path / "new")

    with_service(tmp_path, use)


def on_trial(root: Path, weights: bytes, mode: str = "enforce") -> Rollout:
    """The rule "manners" with another version in shadow."""
    folder = version(save_words(root / "elsewhere" / "manners", weights))
    shadow = Mode.parse("shadow")
    trial = TrialVersion(version=load_card(folder).version, folder=folder, mode=shadow, since=7)
    champion = version(save_words(root / "manners", b"manners"))
    return Rollout(folder=champion, mode=Mode.parse(mode), trial=trial)


def test_a_version_on_trial_is_judged_by_all_replicas_and_leaves_all(tmp_path: Path) -> None:
    """Also when one replica's gate has taken it back, and its registry cannot be written to."""
    rollout = on_trial(tmp_path, b"candidate")
    source = Found({"manners": rollout}.get)
    assert rollout.trial is not None
    trial, name = rollout.trial, trial_name("manners", rollout.trial.version)

    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        before = await p_of_all(service, replicas)
        await service.adopt()
        for replica in replicas.replicas:
            assert name in replica.service._engine.rules
        assert await p_of_all(service, replicas) == before
        async with local_replicas(ServedNote(tmp_path / "served.json"), count=1) as later:
            assert name in later.replicas[0].service._engine.rules
        await service.watch_trials()
        assert source.aborted == []
        replicas.replicas[1].service.take_back(TakenBack("manners", trial, "it flags all"))
        await service.watch_trials()
        async with asyncio.timeout(60):
            while any(name in replica.service._engine.rules for replica in replicas.replicas):
                await asyncio.sleep(0.01)
        assert source.aborted == [("manners", trial.version, "it flags all")]
        assert service.wanted("manners") == Rollout(folder=rollout.folder)
        assert await p_of_all(service, replicas) == before

    with_service(tmp_path, use, source=source)


@pytest.mark.parametrize("weights", [BAD, b"torn"])
def test_a_trial_that_cannot_be_loaded_is_over_and_the_rest_is_done(
    tmp_path: Path, weights: bytes
) -> None:
    rollout = on_trial(tmp_path, weights, mode="shadow")
    source = Found({"manners": rollout}.get)
    if weights == b"torn" and rollout.trial is not None:
        (rollout.trial.folder / PEFT_WEIGHTS).write_bytes(b"half")

    async def use(service: ClusterService, replicas: LocalReplicas) -> None:
        await service.adopt()
        for replica in replicas.replicas:
            answer = as_json(await replica.ask(asked(VIOLATES), service.version))
            assert (answer["verdict"], answer["decided_by"]) == ("violation", ["greeting"])
        await service.watch_trials()
        async with asyncio.timeout(60):
            while not source.aborted:
                await asyncio.sleep(0.01)
        ((_, _, reason),) = source.aborted
        assert "it cannot be served" in reason

    with_service(tmp_path, use, source=source)


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path, rule_sets=SETS)


def judged(client: httpx.Client, **headers: str) -> Any:
    """What a stream of one reply says at its end: streams are judged for the ingress."""
    opening = {"messages": [{"role": "user", "content": "Tell me."}]}
    lines = (opening, {"append": "The sea is wide.", "end": True})
    content = "".join(json.dumps(line) + "\n" for line in lines)
    answer = client.post("/v1/check/stream", content=content, headers=headers)
    return json.loads(answer.text.splitlines()[-1])["judgement"]


def test_nothing_more_of_a_stream_is_released_once_no_replica_is_there(
    cluster: LocalCluster,
) -> None:
    messages = [{"role": "user", "content": "Tell me."}]
    opening = {"messages": messages, "every_tokens": 2, "hold_back": 0}

    async def use(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        first = await stream.read()
        assert first["release"] == "The sea is wide."
        assert len(first["p_violation"]) == len(RULES)
        cluster.pool.replicas = []
        stream.write({"append": " And deep."})
        event = await stream.read()
        assert (event["release"], event["verdict"]) == ("", "unjudged")
        stream.write({"end": True})
        (last,) = await stream.rest()
        assert last["judgement"]["verdict"] == "unjudged" and last["release"] == ""

    with cluster.client() as client:
        streamed(client, opening, use)


def test_replicas_that_are_late_or_gone_judge_nothing(
    cluster: LocalCluster, monkeypatch: MonkeyPatch
) -> None:
    # The caller's time bounds the wait, and not this.
    monkeypatch.setattr("serve.cluster.service.CLOSING_S", 120.0)

    async def hangs(*_: object) -> ReplicaAnswer:
        await asyncio.sleep(300)
        raise ReplicaLost("too late")

    with cluster.client() as client:
        cluster.pool.check = hangs  # type: ignore[method-assign]
        assert judged(client, **{"guard-timeout-ms": "1000"})["code"] == "too_late"
        cluster.pool.replicas = []
        assert "no replica is there" in judged(client)["error"]  # it may have died of it
        assert "no replica is there" in judged(client)["error"]


@pytest.mark.parametrize("failure", ["engine_failed", "too_late", "overloaded"])
def test_a_replica_s_failure_is_told_and_counted_as_one_server_s(
    cluster: LocalCluster, failure: Code
) -> None:
    answer = ReplicaAnswer("a replica", error="not now", code=failure, retry_after_s=2.0)

    async def failed(*_: object) -> ReplicaAnswer:
        return answer

    with cluster.client() as client:
        cluster.pool.check = failed  # type: ignore[method-assign]
        assert judged(client)["code"] == failure
        counts = client.get("/metrics").text
        assert f'guard_check_failures_total{{code="{failure}"}} 1.0' in counts


def test_a_caller_who_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, timeout_s=60.0)
    events: list[str] = []

    async def hangs(*_: object) -> Any:
        events.append("asked")
        try:
            await asyncio.sleep(120)
        finally:
            events.append("cancelled")

    with cluster.client() as client:
        cluster.pool.ask = hangs  # type: ignore[method-assign]
        with waiting_caller(client, "/v1/check", body("a")):
            wait_until(lambda: events == ["asked"])
        wait_until(lambda: "cancelled" in events, 20)  # by itself in a minute


def test_tenants_are_told_apart_and_their_checks_written_once(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    # So that all have come before one is answered, on a busy machine too.
    monkeypatch.setattr("tests.serve.cluster.words_engine.SLOW_S", 2.0)
    audit = tmp_path / "audit.jsonl"
    tenants = tenants_of(tmp_path, SETS, shop="both", bank="either")
    log = AuditLog(audit)
    cluster = LocalCluster(tmp_path, rule_sets=SETS, tenants=tenants, observers=[log])
    shop, bank = {"x-api-key": "shop"}, {"x-api-key": "bank"}
    salts: list[str | None] = []

    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        check = cluster.pool.check

        async def salted(relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
            salts.append(relayed.cache_salt)
            return await check(relayed, key, version)

        cluster.pool.check = salted  # type: ignore[method-assign]
        assert client.post("/v1/check/stream", content="{}").status_code == 401
        for key in (bank, shop):
            assert judged(client, **key)["verdict"] == "allow"
        assert len(set(cluster.pool.keys)) == 2  # the same words of two tenants
        assert [str(salt).partition("/")[0] for salt in salts] == ["bank", "shop"]
        assert client.get("/metrics", headers=shop).status_code == 403
        assert client.get("/metrics", headers={"x-api-key": "admin"}).status_code == 200
        assert client.post("/admin/rules/manners", headers=shop).status_code == 403
        slowly = body(SLOWLY)
        futures = [
            pool.submit(client.post, "/v1/check", json=slowly, headers=shop) for _ in range(8)
        ]
        statuses = [future.result().status_code for future in futures]
        assert statuses.count(429) == 6
    written = [json.loads(line) for line in audit.read_text().splitlines()]
    lines = [line for line in written if line["kind"] == "check"]
    assert [line["tenant"] for line in lines] == ["bank", "shop"]
    assert all(rule["version"] for rule in lines[0]["rules"])
