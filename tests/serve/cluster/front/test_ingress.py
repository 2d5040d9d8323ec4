"""The ingress before replicas in this process: one server's answers, access and limits, for all,
and the sums of their metrics.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pytest import MonkeyPatch

from serve.cluster.front.probes import SummedMetrics, merged
from serve.cluster.messages import RelayedRequest, RelayedResponse
from tests.serve.api.input.every_method import PATHS, check_path
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.cluster.words_cluster import REPLICA, LocalCluster, body, p_of
from tests.serve.cluster.words_engine import SLOWLY, VIOLATES, save_words
from tests.serve.wire_requests import CASES
from tests.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    """Two replicas in this process behind an ingress."""
    return LocalCluster(tmp_path)


def test_checks_are_answered_as_by_one_server_and_a_conversation_by_one_replica(
    cluster: LocalCluster,
) -> None:
    with cluster.client() as client:
        seen: dict[int, set[str]] = {}
        for turns in (1, 3):
            for number in range(20):
                messages = [{"role": "user", "content": f"conversation {number}"}] * turns
                answer = client.post("/v1/check", json={"messages": messages})
                assert answer.json()["verdict"] == "allow"
                assert answer.headers.get_list("x-request-id") != []
                seen.setdefault(number, set()).add(answer.headers[REPLICA])
        assert all(len(replicas) == 1 for replicas in seen.values())
        assert len(set.union(*seen.values())) == 2
        answer = client.post("/v1/check", json=body(VIOLATES), headers={"x-request-id": "mine"})
        assert answer.json()["verdict"] == "violation"
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert client.get("/docs").status_code == 200


def test_policies_are_judged_by_the_replicas_in_checks_and_streams(cluster: LocalCluster) -> None:
    asked = body("On Monday.", "manners") | {"policies": ["Never say Monday"]}
    stream = "\n".join(map(json.dumps, (asked, {"end": True})))
    with cluster.client() as client:
        answer = client.post("/v1/check", json=asked).json()
        assert (answer["verdict"], answer["decided_by"]) == ("violation", ["policies.0"])
        last = client.post("/v1/check/stream", content=stream).text.splitlines()[-1]
        assert json.loads(last)["judgement"]["policies"] == answer["policies"]


def test_a_reply_whose_id_stood_for_two_conversations_is_refused_as_by_one_server(
    cluster: LocalCluster,
) -> None:
    litellm = "/beta/litellm_basic_guardrail_api"
    call = {"litellm_call_id": "1", "request_data": {}}
    reply = call | {"input_type": "response", "texts": ["Rest."]}
    with cluster.client() as client:
        answers = []
        for text in ("Hello", "Good morning"):
            messages = [{"role": "user", "content": text}]
            request = call | {"input_type": "request", "structured_messages": messages}
            said = client.post(litellm, json=request)
            answers.append(client.post(litellm, json=reply))
            assert said.json()["action"] == "NONE"
    answered, refused = answers
    assert answered.json()["action"] == "NONE"
    assert refused.status_code == 422 and set(refused.json()) == {"error", "code"}
    assert "two conversations" in refused.json()["error"]


def test_every_wire_format_is_refused_in_its_own_words_when_no_replica_answers(
    cluster: LocalCluster,
) -> None:
    with cluster.client() as client:
        cluster.pool.replicas = []
        for case in CASES:
            if case.name == "stream":  # which is read here
                continue
            answer = case.say(client, "a")
            said = case.wire_format.error_body(503, "", "nan").keys()
            assert (answer.status_code, answer.json().keys()) == (503, said), case
            assert answer.headers["retry-after"] == "1"
        assert "guard_replicas 0.0" in client.get("/metrics").text


def test_health_is_down_once_there_was_no_replica_for_long(
    cluster: LocalCluster, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.cluster.front.probes.LOST_S", 0.1)
    with cluster.client() as client:
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        there, cluster.pool.replicas = cluster.pool.replicas, []
        time.sleep(0.15)
        # Nobody has asked meanwhile, so nobody knows for how long there is none.
        assert client.get("/healthz").status_code == 200
        wait_until(lambda: client.get("/healthz").status_code == 503)
        cluster.pool.replicas = there
        assert client.get("/healthz").status_code == 200


OPENING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me."}],
    "every_tokens": 2,
    "hold_back": 0,
}


def test_a_stream_is_judged_by_the_replica_of_its_conversation(cluster: LocalCluster) -> None:
    async def use(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        first = await stream.read()
        assert (first["release"], first["verdict"]) == ("The sea is wide.", "allow")
        assert first["p_violation"].keys() == {"greeting", "manners"}
        stream.write({"append": f" And it {VIOLATES}."})
        last = await stream.read()
        assert last["release"] == "" and last["judgement"]["verdict"] == "violation"

    with cluster.client() as client:
        streamed(client, OPENING, use)
        messages = [*OPENING["messages"], {"role": "assistant", "content": "The sea."}]
        client.post("/v1/check", json={"messages": messages})
        assert len(cluster.pool.keys) == 3 and len(set(cluster.pool.keys)) == 1
        streamed(client, OPENING, use, {"x-session-id": "mine"})
        assert len(set(cluster.pool.keys)) == 2
        text = client.get("/metrics").text
        assert 'guard_checks_total{rule_set="",tenant="",verdict="violation"} 2.0' in text
        assert 'guard_request_seconds_count{format="stream",status="200"} 2.0' in text


def test_a_request_has_its_time_and_its_size_also_where_a_replica_hangs(
    cluster: LocalCluster, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.serve.cluster.words_engine.SLOW_S", 2.0)
    # The caller's time bounds the wait, and not this.
    monkeypatch.setattr("serve.cluster.service.CLOSING_S", 120.0)
    in_time = {"guard-timeout-ms": "1000"}

    async def hang(*_: object) -> RelayedResponse:
        await asyncio.sleep(120)
        raise AssertionError

    with cluster.client() as client:
        late = client.post("/v1/check", json=body(SLOWLY), headers=in_time)
        large = client.post("/v1/check", content=b" " * (16 * 2**20 + 1))
        wrong = client.post("/v1/check", json=body("a"), headers={"guard-timeout-ms": "soon"})
        assert (large.status_code, wrong.status_code) == (413, 400)
        cluster.pool.ask = hang  # type: ignore[method-assign,assignment]
        later = client.post("/v1/check", json=body("a"), headers=in_time, timeout=60)
    for answer in (late, later):
        assert (answer.status_code, answer.json()["verdict"]) == (503, "unjudged")
        assert "too long" in answer.json()["error"]


def test_a_body_that_no_route_reads_is_not_read(cluster: LocalCluster) -> None:
    bodies: list[bytes] = []

    async def ask(relayed: RelayedRequest, *_: str) -> RelayedResponse:
        bodies.append(relayed.body)
        return RelayedResponse(204, (), b"")

    with cluster.client() as client:
        cluster.pool.ask = ask  # type: ignore[method-assign,assignment]
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS"):
            client.request(method, "/v1/rules", content=b"as long as the sender likes")
        for path in ("/docs", "/openapi.json", "/nowhere"):  # most need no key
            client.post(path, content=b"as slowly as the sender likes")
        client.post("/v1/check", json=body("a"))
    *unread, posted = bodies
    assert unread == [b""] * 8 and posted != b""


def test_every_method_is_answered_as_by_one_server(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        for path in PATHS:
            check_path(client, path, "greeting")


def test_a_watching_cluster_serves_what_is_trained_again_by_itself(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.api.watch.INTERVAL_S", 0.05)
    monkeypatch.setattr("serve.api.watch.watch.__defaults__", (0.05,))
    cluster = LocalCluster(tmp_path, is_watching=True)
    with cluster.client() as client:

        def answer() -> float:
            return p_of(client.post("/v1/check", json=body("a", "manners")).json())["manners"]

        before = answer()
        save_words(cluster.root / "manners", b"second")
        wait_until(lambda: answer() != before)


def exposition(checks: int, ready: int, *seconds: float, verdict: str = "allow") -> str:
    """What a replica says that has answered so many checks."""
    registry = CollectorRegistry()
    counter = Counter("guard_checks", "Checks.", ["verdict"], registry=registry)
    counter.labels(verdict).inc(checks)
    Gauge("guard_ready", "Ready.", registry=registry).set(ready)
    Gauge("guard_rules_served", "Rules.", registry=registry).set(3)
    histogram = Histogram("guard_check_seconds", "Seconds.", buckets=(1, 2), registry=registry)
    for value in seconds:
        histogram.observe(value)
    Counter("guard_request_seconds", "The replica's own.", registry=registry).inc()
    return generate_latest(registry).decode()


def samples(sums: SummedMetrics, **expositions: str) -> dict[str, float]:
    """All sums as a scrape gives them, by name and labels."""
    own = CollectorRegistry()
    Counter("guard_request_seconds", "The ingress's.", registry=own).inc(7)
    Counter("guard_checks", "Checks.", ["verdict"], registry=own).labels("allow").inc(100)
    text = generate_latest(merged(own, sums.families(expositions))).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name} {labels}".strip()] = sample.value
    return found


def test_counts_are_added_up_and_what_all_have_is_said_once() -> None:
    found = samples(SummedMetrics(), a=exposition(2, 1, 0.5), b=exposition(3, 1, 0.5, 1.5, 9.0))
    assert found["guard_checks_total allow"] == 105
    assert found["guard_ready"] == 2
    assert found["guard_rules_served"] == 3
    assert found["guard_check_seconds_bucket 1.0"] == 2
    assert found["guard_check_seconds_bucket +Inf"] == found["guard_check_seconds_count"] == 4
    assert found["guard_check_seconds_sum"] == 11.5
    assert found["guard_request_seconds_total"] == 7
    assert found["guard_replicas"] == 2
    assert not [name for name in found if "_created" in name]


def test_what_a_replica_counted_stays_when_it_is_gone_and_its_sizes_go() -> None:
    sums = SummedMetrics()
    b = exposition(3, 1, 0.5)
    samples(sums, a=exposition(2, 1), b=b, d=exposition(6, 1, verdict="other"))
    for _ in range(2):
        found = samples(sums, a=exposition(4, 1))
        assert found["guard_checks_total allow"] == 107
        assert found["guard_checks_total other"] == 6  # which it alone had counted
        assert found["guard_ready"] == found["guard_replicas"] == 1
        assert found["guard_check_seconds_count"] == 1
    found = samples(sums, a=exposition(4, 1), b=b, c=exposition(1, 0))
    assert found["guard_checks_total allow"] == 108, "one that missed a scrape is counted once"
    assert found["guard_ready"] == 2
