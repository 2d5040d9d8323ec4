"""Two shards of one replica each on Ray: asked, killed, and back again."""

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
import pytest

from serve.cluster.size import ReplicaRange
from tests.serve.cluster.words_cluster import (
    REPLICA,
    SIX_RULES,
    body,
    p_of,
    ray_cluster,
    replica_processes,
    rules_on,
    trained,
)
from tests.serve.cluster.words_engine import BREAKS, VIOLATES, save_words
from tests.serve.serving import serving
from tests.waiting import wait_until

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
        folders = trained(root, SIX_RULES)
        with (
            ray_cluster(root, ReplicaRange(1, 1), folders, shards=2) as app,
            serving(app) as client,
        ):
            yield ServedShards(client, root)


def wait_for_both(client: httpx.Client) -> None:
    def are_there() -> bool:
        answer = client.post("/v1/check", json=body(f"hello {time.monotonic()}"))
        return answer.status_code == 200 and not answer.json()["unjudged"]

    wait_until(are_there, 120)


def test_a_conversation_stays_in_each_shard_and_a_rule_that_is_added_is_on_one(
    shards: ServedShards,
) -> None:
    client = shards.client
    messages = [{"role": "user", "content": f"this {BREAKS} {SECOND[1]}"}]
    places = set()
    for turn in range(3):
        answer = client.post("/v1/check", json={"messages": messages})
        places.add(answer.headers[REPLICA])
        assert answer.json()["decided_by"] == [SECOND[1]]
        assert tuple(p_of(answer.json())) == SIX_RULES
        messages.append({"role": "assistant", "content": f"turn {turn}"})
    (both,) = places
    assert len(set(both.split(", "))) == 2
    metrics = client.get("/metrics").text
    assert "guard_replicas 2.0" in metrics and 'guard_shard_replicas{shard="1"} 1.0' in metrics
    assert "guard_adapters 6.0" in metrics and "guard_rules_served 6.0" in metrics
    probabilities = set()
    for weights in (b"new", b"newer"):
        save_words(shards.root / "new", weights)
        assert client.post("/admin/rules/new").status_code == 200
        alone = client.post("/v1/check", json=body("a", "new"))
        assert ", " not in alone.headers[REPLICA]
        probabilities.add(p_of(alone.json())["new"])
    assert len(probabilities) == 2
    assert client.delete("/admin/rules/new").status_code == 200
    assert client.post("/v1/check", json=body("a", "new")).status_code == 422


@contextlib.contextmanager
def lost_second(shards: ServedShards) -> Iterator[None]:
    """The second shard's replica is killed, and none starts until the end."""
    noted = shards.root / "served" / "shard-1.json"
    hidden = noted.with_suffix(".hidden")
    wait_for_both(shards.client)
    (process,) = replica_processes(shard=1)
    noted.rename(hidden)
    try:
        os.kill(process, signal.SIGKILL)
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
