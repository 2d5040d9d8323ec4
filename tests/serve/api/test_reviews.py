"""Reviews over HTTP: who may say what of which check, and that no review costs a verdict."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.api.keeping import MOST_WAITING
from serve.registry.reviews import KEY
from tests.serve.api.tenants import HEADERS, RULE_SETS, shop_and_bank
from tests.serve.cluster.words_cluster import LocalCluster, body
from tests.serve.cluster.words_engine import VIOLATES
from tests.serve.review_store import SECRET, new_key, opened
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import LOGITS, ToyEngine
from tests.waiting import wait_until

SAID = [{"role": "user", "content": SECRET}]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())


def check(client: httpx.Client, request_id: str, who: str = "", **more: Any) -> None:
    headers = {"x-request-id": request_id, **HEADERS.get(who, {})}
    answer = client.post("/v1/check", json={"messages": SAID, **more}, headers=headers)
    assert answer.status_code == 200, answer.text


def feedback(client: httpx.Client, request_id: str, who: str = "", **more: Any) -> httpx.Response:
    vote = {"request_id": request_id, "rule": "fine", "label": "violation", "reviewer": "ann"}
    return client.post("/v1/feedback", json=vote | more, headers=HEADERS.get(who))


def queue(client: httpx.Client, who: str = "", reviewer: str = "eve") -> list[Any]:
    query = {"reviewer": reviewer, "rule": "fine"}
    answer = client.get("/admin/reviews", params=query, headers=HEADERS.get(who))
    assert answer.status_code == 200, answer.text
    reviews: list[Any] = answer.json()
    return reviews


def test_a_check_is_kept_labelled_and_forgotten(serve: Serve, tmp_path: Path) -> None:
    client = serve(ToyEngine(LOGITS), review_store=opened(tmp_path))
    check(client, "one")
    wait_until(lambda: queue(client))
    (review,) = queue(client)
    assert (review["request_id"], review["messages"], review["verdict"]) == ("one", SAID, "allow")
    assert review["version"] == "0123456789abcdef" and review["threshold"] == 0.25
    counts = {"violation": 1, "allow": 0, "needed": 2, "settled": False}
    assert feedback(client, "one").json() == counts
    assert feedback(client, "one", label="allow").status_code == 409
    undo = {"request_id": "one", "rule": "fine", "reviewer": "ann"}
    assert client.delete("/v1/feedback", params=undo).json()["violation"] == 0
    assert client.delete(f"/admin/reviews/{review['conversation']}").json() == {"checks": 1}
    assert feedback(client, "one").status_code == 404


def test_checks_that_explain_another_are_not_kept(serve: Serve, tmp_path: Path) -> None:
    client = serve(ToyEngine(LOGITS), review_store=opened(tmp_path))
    check(client, "explained", messages=[*SAID, *SAID], explain=True)
    check(client, "last")
    wait_until(lambda: queue(client) and queue(client)[0]["request_id"] == "last")
    assert [len(review["messages"]) for review in queue(client)] == [1, 2]


def test_a_tenant_is_one_reviewer_of_its_own_requests(serve: Serve, tmp_path: Path) -> None:
    settings = {"rule_sets": RULE_SETS, "tenants": shop_and_bank()}
    client = serve(ToyEngine(LOGITS), review_store=opened(tmp_path), **settings)
    check(client, "one", "shop")
    wait_until(lambda: queue(client, "reviewer"))
    assert feedback(client, "one", "bank").status_code == 404
    assert feedback(client, "one", "shop", rule="flagged").status_code == 404
    assert feedback(client, "one", "").status_code == 401
    for reviewer in ("ann", "bob"):
        assert feedback(client, "one", "shop", reviewer=reviewer).json()["violation"] == 1
    assert feedback(client, "one", "viewer").status_code == 403
    # Nor does an admin vote for others.
    assert feedback(client, "one", "reviewer", reviewer="tenant:shop").json()["settled"]
    assert queue(client, "publisher") == []
    for who in ("shop", "viewer"):
        assert client.get("/admin/reviews?reviewer=a", headers=HEADERS[who]).status_code == 403


def test_messages_come_with_a_label_where_none_were_kept(serve: Serve, tmp_path: Path) -> None:
    client = serve(ToyEngine(LOGITS), review_store=opened(tmp_path, share=0.0, uncertain=0.0))
    check(client, "one", rules=["fine"])
    refused = feedback(client, "one")
    assert refused.status_code == 404 and "Send its `messages`" in refused.json()["error"]
    assert feedback(client, "one", messages=[{"role": "user", "content": " "}]).status_code == 422
    assert feedback(client, "one", messages=SAID).json()["violation"] == 1
    (review,) = queue(client)
    assert (review["messages"], review["verdict"], review["votes"]) == (SAID, None, 1)


def test_without_tenants_another_machine_reviews_nothing_and_without_a_store_nobody(
    serve: Serve, tmp_path: Path
) -> None:
    client = serve(ToyEngine(LOGITS), review_store=opened(tmp_path))
    client.headers["x-forwarded-for"] = "10.0.0.1"
    assert feedback(client, "one", messages=SAID).status_code == 403
    off = feedback(serve(ToyEngine(LOGITS)), "one")
    assert off.status_code == 404 and "make up REVIEWS=" in off.json()["error"]


def test_a_store_that_cannot_be_written_costs_no_verdict(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    client = serve(ToyEngine(LOGITS), review_store=store)
    monkeypatch.setattr("serve.registry.database.LOCKED_S", 0.01)
    with closing(sqlite3.connect(store.file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with caplog.at_level(logging.ERROR):
            for number in range(5):
                check(client, str(number))
            wait_until(lambda: "guard_reviews_dropped_total 5.0" in client.get("/metrics").text)
        assert feedback(client, "1").status_code == 503
    said = [line.getMessage() for line in caplog.records if "kept for review" in line.getMessage()]
    assert len(said) == 1 and "database is locked" in said[0] and SECRET not in caplog.text
    monkeypatch.setattr("serve.registry.database.LOCKED_S", 10.0)
    check(client, "afterwards")
    wait_until(lambda: queue(client))


def test_what_waits_to_be_written_is_bounded(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    client = serve(ToyEngine(LOGITS), review_store=store)
    with closing(sqlite3.connect(store.file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        for number in range(MOST_WAITING + 3):
            check(client, str(number))
        assert "guard_reviews_dropped_total 2.0" in client.get("/metrics").text
    wait_until(lambda: len(queue(client)) == 20)


def test_a_cluster_keeps_checks_and_streams_and_its_ingress_has_them_reviewed(
    tmp_path: Path,
) -> None:
    cluster = LocalCluster(tmp_path, review_store=opened(tmp_path))
    with cluster.client() as client:
        for number in range(4):
            client.post("/v1/check", json=body(f"{VIOLATES} {number}"))
        lines = [{"messages": MESSAGES}, {"append": "One. "}, {"append": "Two.", "end": True}]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        assert '"allow"' in client.post("/v1/check/stream", content=content).text
        query = {"reviewer": "ann", "rule": "manners"}
        wait_until(lambda: len(client.get("/admin/reviews", params=query).json()) == 5)
        kept = [review["messages"] for review in client.get("/admin/reviews", params=query).json()]
        assert [*MESSAGES, {"role": "assistant", "content": "One. Two."}] in kept
        assert "guard_reviews_dropped_total 0.0" in client.get("/metrics").text
