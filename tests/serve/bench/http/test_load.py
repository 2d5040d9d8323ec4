"""Open-loop load on a real server around a toy engine: what is answered and what is shed."""

from __future__ import annotations

import time

import pytest

from serve.api.app import create_app
from serve.bench.http.load import send
from serve.bench.http.overhead import as_body
from tests.serve.guarded import CONVERSATION
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

BODY = as_body(CONVERSATION, ["fine"])


def test_checks_are_sent_when_they_are_due_and_each_is_accounted_for() -> None:
    engine = ToyEngine({"fine": -2.0})
    seen: list[float] = []
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        due_s = [0.0, 0.1, 0.3]
        run = send(str(client.base_url), [BODY] * 3, due_s, 5.0, lambda: seen.append(time.time()))
    assert run.count(200) == len(run.answered_s) == len(seen) == 3
    assert run.wall_s >= 0.3
    assert all(0 < latency < run.wall_s for latency in run.answered_s)


def test_no_more_checks_are_under_way_than_may_be() -> None:
    engine = ToyEngine({"fine": -2.0})
    engine.on_step = lambda: time.sleep(0.02)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        run = send(str(client.base_url), [BODY] * 9, [0.0] * 9, 5.0, list, at_once=3)
    assert run.count(200) == 9
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
        run = send(str(client.base_url), [BODY] * 8, [0.01 * n for n in range(8)], 5.0, list)
    assert run.count(503) > 0 and run.count(200) > 0
    assert run.count(503) + run.count(200) == 8
    assert len(run.answered_s) == run.count(200)
