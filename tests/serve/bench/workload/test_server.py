"""The server's process, and open-loop load on a real server around a toy engine."""

from __future__ import annotations

import subprocess
import time

import pytest

from guard.errors import GuardError
from serve.api.app import create_app
from serve.bench.workload.server import (
    HttpRun,
    RunningServer,
    SentCheck,
    as_body,
    send,
    server_environment,
    steady_rate,
)
from tests.serve.guarded import CONVERSATION
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

BODY = as_body(CONVERSATION, ["fine"])


def test_checks_are_sent_when_they_are_due_and_no_more_are_under_way_than_may_be() -> None:
    engine = ToyEngine({"fine": -2.0})
    engine.on_step = lambda: time.sleep(0.02)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        assert send(str(client.base_url), [BODY] * 3, [0.0, 0.1, 0.3], 5.0).wall_s >= 0.3
        run = send(str(client.base_url), [BODY] * 9, [0.0] * 9, 5.0, at_once=3)
    assert run.count(200) == len(run.answered_s) == 9
    assert all(0 < latency < run.wall_s for latency in run.answered_s)
    began_s = [check.latency_s - check.waited_s for check in run.sent]
    under_way: list[int] = []
    for moment_s in began_s:
        spans = zip(began_s, run.answered_s, strict=True)
        under_way.append(sum(since_s <= moment_s < until_s for since_s, until_s in spans))
    assert max(under_way) == 3


@pytest.mark.slow
def test_what_the_server_sheds_is_counted_and_has_no_latency_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_QUEUED", 1)
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_OPEN", 1)
    engine = ToyEngine({"fine": -2.0})
    engine.on_step = lambda: time.sleep(0.2)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        run = send(str(client.base_url), [BODY] * 8, [0.01 * n for n in range(8)], 5.0)
    assert run.count(503) > 0 and run.count(503) + run.count(200) == 8
    assert len(run.answered_s) == run.count(200) > 0


def test_the_rate_is_that_of_the_middle_where_as_many_checks_are_under_way_all_the_time() -> None:
    slow_start, steady = [9.0, 9.5, 10.0], [10.0 + 0.1 * number for number in range(1, 7)]
    assert steady_rate([*slow_start, *steady, 13.0, 18.0, 20.0][::-1]) == pytest.approx(10)
    with pytest.raises(GuardError, match="hardly any check was answered"):
        steady_rate([1.0, 2.0, 3.0])


def test_only_answers_count_as_late_and_from_when_they_were_sent() -> None:
    statuses = [(200, 0.1), (200, 5.02), (200, 7.0), (503, 9.0), (0, 1.0), (500, 9.0)]
    sent = tuple(SentCheck(status, latency_s, latency_s - 0.05) for status, latency_s in statuses)
    run = HttpRun(sent, wall_s=4.0)
    assert (run.count(200), run.count(503), run.late(5.0)) == (3, 1, 1)
    assert run.answered_s == [0.1, 5.02, 7.0]


def test_a_server_s_threads_wait_as_those_of_make_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert server_environment()["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert "GOMP_SPINCOUNT" not in server_environment()


def test_the_memory_of_a_server_that_has_ended_is_an_error() -> None:
    process = subprocess.Popen(["sleep", "60"], text=True)
    server = RunningServer("http://here", process)
    assert 0 < server.memory_mib() < 100
    process.kill()
    process.wait()
    with pytest.raises(GuardError, match="the server has ended"):
        server.memory_mib()
