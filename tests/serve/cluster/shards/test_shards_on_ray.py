"""Two shards of one replica each on Ray: killed, changed, and asked as one server."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from serve.cluster.size import ReplicaRange
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.cluster.processes import replica_processes
from tests.serve.cluster.shards.sharded_words import (
    REPLICA,
    RULES,
    one_server,
    ray_shards,
    rules_on,
    saved,
)
from tests.serve.cluster.words_cluster import body
from tests.serve.cluster.words_engine import BREAKS, VIOLATES, save_words
from tests.serve.serving import serving

pytestmark = pytest.mark.slow

FIRST, SECOND = rules_on(0), rules_on(1)


@dataclass(frozen=True)
class ServedShards:
    """A client of the cluster, and where its weights are."""

    client: httpx.Client
    root: Path


@pytest.fixture(scope="module")
def shards() -> Iterator[ServedShards]:
    with tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with (
            ray_shards(root, ReplicaRange(1, 1), saved(root)) as app,
            serving(app) as client,
        ):
            yield ServedShards(client, root)


def wait_for_both(client: httpx.Client, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = client.post("/v1/check", json=body(f"hello {time.monotonic()}"))
        if answer.status_code == 200 and not answer.json()["unjudged"]:
            return
        time.sleep(0.1)
    pytest.fail("a shard did not come back")


def without_times(answer: httpx.Response) -> dict[str, object]:
    content: dict[str, object] = answer.json()
    return {key: value for key, value in content.items() if key != "latency_ms"}


def test_answers_are_those_of_one_server_and_a_conversation_stays_in_each_shard(
    shards: ServedShards,
) -> None:
    client = shards.client
    texts = ("hello", f"this {BREAKS} {FIRST[0]}", f"this {BREAKS} {SECOND[1]}", VIOLATES)
    with one_server({rule: shards.root / rule for rule in RULES}) as alone:
        for text in texts:
            for asked in (body(text), body(text, SECOND[1], FIRST[0]), body(text, FIRST[1])):
                merged = client.post("/v1/check", json=asked)
                assert merged.status_code == 200
                assert without_times(merged) == without_times(alone.post("/v1/check", json=asked))
    messages = [{"role": "user", "content": "a conversation"}]
    places = set()
    for turn in range(3):
        places.add(client.post("/v1/check", json={"messages": messages}).headers[REPLICA])
        messages.append({"role": "assistant", "content": f"turn {turn}"})
    (both,) = places
    assert len(set(both.split(", "))) == 2
    metrics = client.get("/metrics").text
    assert "guard_replicas 2.0" in metrics and 'guard_shard_replicas{shard="1"} 1.0' in metrics
    assert "guard_adapters 6.0" in metrics and "guard_rules_served 6.0" in metrics


def test_a_rule_is_added_to_one_shard_and_served_and_changes_there(shards: ServedShards) -> None:
    client = shards.client
    save_words(shards.root / "new", b"new")
    assert client.post("/v1/check", json=body("a", "new")).status_code == 422
    assert client.post("/admin/rules/new").status_code == 200
    answer = client.post("/v1/check", json=body(f"{BREAKS} new", "new", *RULES))
    assert answer.json()["decided_by"] == ["new"]
    assert len(answer.json()["results"]) == len(RULES) + 1
    alone = client.post("/v1/check", json=body("a", "new"))
    assert ", " not in alone.headers[REPLICA]
    before = alone.json()["results"][0]["p_violation"]
    save_words(shards.root / "new", b"newer")
    assert client.post("/admin/rules/new").status_code == 200
    after = client.post("/v1/check", json=body("a", "new")).json()["results"][0]["p_violation"]
    assert after != before
    assert client.delete("/admin/rules/new").status_code == 200
    assert client.post("/v1/check", json=body("a", "new")).status_code == 422
    assert client.get("/metrics").text.count("guard_rule_info{") == len(RULES)


@contextlib.contextmanager
def lost_second(shards: ServedShards) -> Iterator[None]:
    """The second shard's replica is killed, and none starts until the end."""
    noted = shards.root / "served" / "shard-1.json"
    hidden = noted.with_suffix(".hidden")
    wait_for_both(shards.client)
    noted.rename(hidden)
    try:
        os.kill(process_of(1), signal.SIGKILL)
        yield
    finally:
        hidden.rename(noted)


def test_a_killed_shard_is_unjudged_while_the_other_judges_and_comes_back(
    shards: ServedShards,
) -> None:
    client = shards.client
    place = client.post("/v1/check", json=body("a", *SECOND)).headers[REPLICA]
    with lost_second(shards):
        for number in range(4):
            began = time.monotonic()
            answer = client.post("/v1/check", json=body(f"{VIOLATES} {number}"))
            content = answer.json()
            assert answer.status_code == 200 and content["verdict"] == "violation"
            assert [result["rule"] for result in content["results"]] == FIRST
            assert [rule["rule"] for rule in content["unjudged"]] == SECOND
            assert content["unjudged"][0]["reason"]
            assert time.monotonic() < began + 25  # and not until its 30 s are over
        assert client.post("/v1/check", json=body("hello")).json()["verdict"] == "unjudged"
        of_first = client.post("/v1/check", json=body("hello", *FIRST)).json()
        assert of_first["verdict"] == "allow"
        alone = client.post("/v1/check", json=body("hello", *SECOND))
        assert (alone.status_code, alone.json()["verdict"]) == (503, "unjudged")
        assert client.get("/readyz").status_code == 200
        assert 'guard_shard_replicas{shard="1"} 0.0' in client.get("/metrics").text
        assert client.post(f"/admin/rules/{SECOND[0]}").status_code == 409
    wait_for_both(client)
    assert client.post("/v1/check", json=body("a", *SECOND)).headers[REPLICA] != place


def process_of(shard: int) -> int:
    """The process of a shard's only replica, by the name that Ray gives it."""
    found: list[int] = []
    for pid in replica_processes():
        if f"ServeReplica:centurion-{shard}:" in " ".join(psutil.Process(pid).cmdline()):
            found.append(pid)
    (pid,) = found
    return pid


def test_a_stream_is_judged_by_both_shards_and_nothing_is_released_of_a_lost_one(
    shards: ServedShards,
) -> None:
    client = shards.client
    wait_for_both(client)
    opening = {
        "messages": [{"role": "user", "content": "Tell me."}],
        "every_tokens": 2,
        "hold_back": 0,
    }

    async def allowed(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        first = await stream.read()
        assert first["release"] == "The sea is wide." and len(first["p_violation"]) == len(RULES)
        stream.write({"append": f" It {BREAKS} {SECOND[0]}."})
        last = await stream.read()
        assert last["release"] == "" and last["judgement"]["decided_by"] == [SECOND[0]]

    streamed(client, opening, allowed)

    async def killed(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        assert (await stream.read())["release"] == "The sea is wide."
        with lost_second(shards):
            stream.write({"append": " And deep.", "end": True})
            last = await stream.read()
        assert last["judgement"]["verdict"] == "unjudged" and last["release"] == ""
        assert len(last["judgement"]["results"]) == len(FIRST)

    streamed(client, opening, killed)
    wait_for_both(client)
