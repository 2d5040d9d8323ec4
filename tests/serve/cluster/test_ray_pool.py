"""Replicas on one Ray: started, killed, changed, filled. Nothing is lost, nothing falsely allowed.

Applications follow one another, since they have one name: that of the last tests stays until the
module's end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from pytest import LogCaptureFixture, MonkeyPatch

from guard.errors import GuardError
from serve.cluster.messages import ReplicaLost
from tests.serve.cluster.words_cluster import (
    REPLICA,
    alone,
    body,
    deployed,
    p_of,
    replica_processes,
    trained,
)
from tests.serve.cluster.words_engine import BAD, SLOWLY, VIOLATES, save_words
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests, of which no thread goes on after its end."""
    from serve.cluster.ray_pool import serve_on_ray  # Ray, which quick tests do not have

    # With a short path, which leaves room for those of Ray's sockets.
    with (
        tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True) as folder,
        serve_on_ray(2, Path(folder)),
    ):
        yield
    log = tmp_path_factory.mktemp("ray") / "log"
    handler = logging.FileHandler(log)
    serve_log = logging.getLogger("ray.serve")  # which hands nothing on
    serve_log.addHandler(handler)
    time.sleep(1.5)
    serve_log.removeHandler(handler)
    assert log.read_text() == ""


@pytest.mark.usefixtures("running_ray")
def test_a_replica_that_does_not_start_is_an_error_with_its_words(tmp_path: Path) -> None:
    folders = trained(tmp_path)
    save_words(folders["manners"], BAD)
    with (
        pytest.raises(GuardError, match=r"a replica does not start: .*these weights are bad"),
        deployed(tmp_path, 1, folders),
    ):
        pytest.fail("it started")


@dataclass
class Load:
    """Checks that VIOLATE, sent without a pause, and what came of each."""

    client: httpx.Client
    rules: tuple[str, ...] = ()
    word: str = ""
    answers: list[httpx.Response] = field(default_factory=list)
    lost: list[Exception] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def send(self, sender: int) -> None:
        number = 0
        with alone(self.client) as client:
            while not self.is_over.is_set():
                number += 1
                text = f"{self.word} {VIOLATES} {sender} {number}"
                try:
                    self.answers.append(client.post("/v1/check", json=body(text, *self.rules)))
                except Exception as error:
                    self.lost.append(error)

    @contextlib.contextmanager
    def sent_by(self, senders: int) -> Iterator[None]:
        """Sends for as long as the block, whatever happens in it: else nobody could join them."""
        with ThreadPoolExecutor(senders) as pool:
            for sender in range(senders):
                pool.submit(self.send, sender)
            try:
                yield
            finally:
                self.is_over.set()

    def assert_nothing_lost_or_allowed(self) -> collections.Counter[tuple[int, str]]:
        assert self.lost == []
        return counted(self.answers)


def counted(answers: Sequence[httpx.Response]) -> collections.Counter[tuple[int, str]]:
    """How often each status came with each verdict: none is an allow."""
    counts = collections.Counter(
        (answer.status_code, answer.json()["verdict"]) for answer in answers
    )
    assert set(counts) <= {(200, "violation"), (503, "unjudged")}, counts
    return counts


@dataclass(frozen=True)
class Served:
    """Two replicas, and where their weights are."""

    client: httpx.Client
    folders: Mapping[str, Path]


@pytest.fixture(scope="module")
def two_replicas(running_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("two")
    folders = trained(root)
    with deployed(root, 2, folders) as client:
        yield Served(client, folders)


@pytest.fixture
def cluster(two_replicas: Served) -> Served:
    """Both replicas are there."""
    wait_for_two(two_replicas.client)
    return two_replicas


def replicas_of(client: httpx.Client, checks: int = 12) -> set[str]:
    """The replicas that answer new conversations."""
    seen = set()
    for number in range(checks):
        answer = client.post("/v1/check", json=body(f"hello {number} {time.monotonic()}"))
        seen.add(answer.headers.get(REPLICA, ""))
    return seen


def wait_for_two(client: httpx.Client) -> None:
    def are_there() -> bool:
        in_metrics = "guard_replicas 2.0" in client.get("/metrics").text
        return in_metrics and len(replicas_of(client)) == 2

    wait_until(are_there, 120)


def probability(client: httpx.Client) -> float:
    """What the rule says now of one text that VIOLATES, on whichever replica."""
    text = body(f"{VIOLATES} {time.monotonic()}", "manners")
    return p_of(client.post("/v1/check", json=text).json())["manners"]


def test_a_killed_replica_loses_nothing_allows_nothing_and_comes_back_with_what_is_served(
    cluster: Served,
) -> None:
    client, manners = cluster.client, cluster.folders["manners"]
    save_words(manners, b"served")
    assert client.post("/admin/rules/manners").status_code == 200
    served = probability(client)
    save_words(manners, b"in the folder alone")
    before = replicas_of(client)
    load = Load(client, word=SLOWLY)  # so that checks are under way on both at any time
    with load.sent_by(12):
        wait_until(lambda: len(load.answers) + len(load.lost) >= 24)
        while not any(answer.status_code == 503 for answer in load.answers):  # it was idle
            os.kill(replica_processes()[0], signal.SIGKILL)
            time.sleep(0.5)
    counts = load.assert_nothing_lost_or_allowed()
    assert counts[200, "violation"] > 0 and counts[503, "unjudged"] > 0
    # What kills a replica would kill the next one too.
    died = [answer for answer in load.answers if "has died" in answer.text]
    assert not any("retry-after" in answer.headers for answer in died)
    assert client.get("/healthz").status_code == 200
    wait_for_two(client)
    assert replicas_of(client) != before
    answered: dict[str, set[float]] = {}
    for number in range(20):
        answer = client.post("/v1/check", json=body(f"{VIOLATES} {number}", "manners"))
        answered.setdefault(answer.headers[REPLICA], set()).add(p_of(answer.json())["manners"])
    assert (len(answered), set.union(*answered.values())) == (2, {served})


def test_a_silent_replica_is_left_out_by_probes_and_hides_no_other(cluster: Served) -> None:
    client = cluster.client
    silent = replica_processes()[0]
    os.kill(silent, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            ready = pool.submit(client.get, "/readyz")
            metrics = pool.submit(client.get, "/metrics").result()
        assert ready.result().status_code == metrics.status_code == 200
        assert "guard_replicas 1.0" in metrics.text
    finally:
        os.kill(silent, signal.SIGCONT)


def test_a_rule_changes_under_load_without_a_lost_or_mixed_answer(cluster: Served) -> None:
    client, manners = cluster.client, cluster.folders["manners"]
    several = {"input": [f"{VIOLATES} {number}" for number in range(20)], "model": "manners"}
    scores: list[tuple[float, set[float]]] = []
    load = Load(client, ("manners",))

    def send_several() -> None:
        with alone(client) as own:
            while not load.is_over.is_set():
                began = time.monotonic()
                answer = own.post("/v1/moderations", json=several)
                assert answer.status_code == 200, answer.text
                results = answer.json()["results"]
                found = {result["category_scores"]["manners"] for result in results}
                scores.append((began, found))

    versions: list[tuple[float, float]] = []  # until when the old one may answer, and its p
    with ThreadPoolExecutor(2) as pool, load.sent_by(4):
        sending = [pool.submit(send_several) for _ in range(2)]
        for weights in (b"second", b"third"):
            time.sleep(0.3)
            before = probability(client)
            save_words(manners, weights)
            assert client.post("/admin/rules/manners").status_code == 200
            versions.append((time.monotonic(), before))
            assert probability(client) != before
            save_words(manners, BAD)
            now = probability(client)
            assert client.post("/admin/rules/manners").status_code == 409
            assert probability(client) == now
    for future in sending:
        future.result()
    assert set(load.assert_nothing_lost_or_allowed()) == {(200, "violation")}
    assert len(scores) > 3
    for began, found in scores:
        assert len(found) == 1, "an answer of two versions"
        for changed, before in versions:
            assert began < changed or before not in found, "an old version after the change"


def test_more_than_replicas_take_is_unjudged_and_never_lost(cluster: Served) -> None:
    def check(number: int) -> httpx.Response:
        with alone(cluster.client) as own:
            return own.post("/v1/check", json=body(f"{SLOWLY} {VIOLATES} {number}"))

    with ThreadPoolExecutor(400) as pool:
        answers = list(pool.map(check, range(400)))
    counts = counted(answers)
    assert sum(counts.values()) == 400 and counts[200, "violation"] > 64
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)


def test_a_silent_controller_holds_one_thread_and_nobody_for_long(monkeypatch: MonkeyPatch) -> None:
    from serve.cluster import ray_pool  # Ray, which quick tests do not have

    looks: list[int] = []
    is_over = threading.Event()

    def silent() -> None:
        looks.append(1)
        is_over.wait(60)

    async def run() -> None:
        no_handle: Any = None
        pool = ray_pool.RayPool(no_handle)
        for _ in range(3):
            with pytest.raises(ReplicaLost, match="did not say"):
                await pool.running()
        is_over.set()  # else nothing would join its thread

    monkeypatch.setattr(ray_pool, "LOOK_S", 0.05)
    monkeypatch.setattr(ray_pool.serve, "status", silent)
    asyncio.run(run())
    assert looks == [1]


def test_the_log_has_no_words_of_an_error_that_may_quote_a_request(
    caplog: LogCaptureFixture,
) -> None:
    from serve.cluster.ray_pool import _lost  # Ray, which quick tests do not have

    lost = _lost(ValueError("my address is 5 Elm Street"))
    assert "ValueError" in caplog.text and "Elm Street" not in caplog.text + str(lost)
