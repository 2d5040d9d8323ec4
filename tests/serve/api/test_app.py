"""The server around an engine, whichever format is spoken: every method of every path, ids, errors
that are no verdict, probes, and checks that end when their caller is gone or the engine hangs.
"""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from httpx import Client

from guard.errors import GuardError
from serve.api.app import create_app
from serve.api.input.limits import TEXTS_AT_ONCE
from serve.engine import Refusal
from serve.engine.refusals import Overloaded, TooLate
from tests.serve.api.input.every_method import PATHS, check_path
from tests.serve.api.observe.toy_record import Records
from tests.serve.serving import MESSAGES, Serve, serving, waiting_caller
from tests.serve.toy_engine import MortalEngine, ToyEngine
from tests.waiting import wait_until

JSON = "application/json"
FINE = {"messages": MESSAGES, "rules": ["fine"]}


@pytest.mark.parametrize("path", PATHS)
def test_every_method_of_a_path_is_answered_by_what_the_path_has(serve: Serve, path: str) -> None:
    """By a server of its own: one of the methods removes a rule."""
    check_path(serve(ToyEngine({"fine": -2.0, "more": -2.0})), path, "fine")


def test_a_caller_s_id_comes_back_and_what_is_none_does_not(client: Client) -> None:
    def answered(path: str, request_id: str) -> str:
        return client.get(path, headers={"x-request-id": request_id}).headers["x-request-id"]

    for path in ("/v1/rules", "/nowhere"):
        for request_id in ("4bf92f35-77b3.1:2_x", "x" * 64):
            assert answered(path, request_id) == request_id
        for no_id in ("", "two words", "x" * 65):
            assert re.fullmatch("[0-9a-f]{32}", answered(path, no_id))


def test_of_many_faults_the_first_are_named_and_others_counted(client: Client) -> None:
    """Of a list the first wrong item alone: looking at all of them takes long."""
    wrong = {"messages": [{"role": "root", "content": "Hi"}] * 20, "rules": {}, "rule_set": []}
    body = wrong | {"metadata": [], "explain": "?", "cache_salt": []}
    error = client.post("/v1/check", json=body).json()["error"]
    named = [problem.split(":")[0] for problem in error.split("; ")[:5]]
    assert set(named) < set(body) | {"messages.0.role"} and "messages.0.role" in named
    assert error.endswith("; and 1 more")
    many_keys = {"messages": MESSAGES} | {str(key): 1 for key in range(100_000)}
    assert "100000 keys are unknown" in client.post("/v1/check", json=many_keys).json()["error"]
    no_object = "the body must be a JSON object, sent with `content-type: application/json`"
    for content, kind, told in (
        ('{"messages": oops}', JSON, "the body is not JSON: Expecting value at character 13"),
        ('{"messages": []}', "text/plain", no_object),
        ("[]", JSON, no_object),
    ):
        response = client.post("/v1/check", content=content, headers={"content-type": kind})
        assert response.status_code == 422 and response.json()["error"].startswith(told)


def test_an_unexpected_error_is_unjudged(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.api.formats.check.CheckResponse.of", lambda _: 1 / 0)
    response = client.post("/v1/check", json=FINE, headers={"x-request-id": "a3f9"})
    assert (response.status_code, response.json()["verdict"]) == (500, "unjudged")
    assert response.headers["x-request-id"] == "a3f9"
    assert response.headers["connection"] == "close"  # as the server does


@pytest.mark.parametrize(
    ("kind", "stated", "told"),
    [
        (Overloaded, "3", "too much waits"),
        (TooLate, None, "too much waits"),
        (GuardError, None, "the engine failed; the server's log says why"),
    ],
)
def test_who_is_refused_for_want_of_room_and_nobody_else_is_told_when_there_may_be_some(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[GuardError],
    stated: str | None,
    told: str,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        refused = kind("too much waits")
        if isinstance(refused, Overloaded):
            refused.retry_after_s = 2.3
        raise refused

    monkeypatch.setattr("serve.engine.thread.engine_thread.EngineThread.check", refuse)
    response = client.post("/v1/check", json=FINE)
    assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
    assert response.json()["error"] == told
    assert response.headers.get("retry-after") == stated
    assert (response.headers.get("x-should-retry") == "false") is (stated is None)
    assert ("too much waits" in caplog.text) is (kind is GuardError)


def test_tools_nested_as_deeply_as_can_be_read_are_refused_and_no_crash(client: Client) -> None:
    kind, messages = {"content-type": JSON}, json.dumps(MESSAGES)
    deepest = sys.getrecursionlimit()
    errors = []
    for depth in range(deepest - 150, deepest):
        tools = f'[{{"parameters": {"[" * depth}{"]" * depth}}}]'
        body = f'{{"messages": {messages}, "rules": ["fine"], "tools": {tools}}}'
        response = client.post("/v1/check", content=body, headers=kind)
        assert response.status_code in (200, 400, 422), response.text
        errors.append(response.json().get("error", ""))
    assert any("nested too deeply" in error for error in errors)


def probe(client: Client) -> tuple[int, int]:
    """The statuses of /healthz and /readyz."""
    alive, ready = client.get("/healthz"), client.get("/readyz")
    for response in (alive, ready):
        assert response.json() == {"status": "ok" if response.is_success else "down"}
    return alive.status_code, ready.status_code


def test_a_full_queue_is_alive_and_not_ready_and_a_failed_engine_is_neither(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_QUEUED", 1)
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_OPEN", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    client = serve(engine)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/v1/check", json=FINE)
        wait_until(lambda: engine.open)
        second = pool.submit(client.post, "/v1/check", json=FINE)
        wait_until(lambda: "guard_checks_waiting 1.0" in client.get("/metrics").text)
        assert probe(client) == (200, 503)
        shed = client.post("/v1/check", json=FINE)
        assert (shed.status_code, shed.json()["verdict"]) == (503, "unjudged")
        assert int(shed.headers["retry-after"]) > 0
        engine.may_step.set()
        assert {first.result(10).status_code, second.result(10).status_code} == {200}
    assert probe(client) == (200, 200)
    engine.is_usable = False
    assert probe(client) == (503, 503)


def test_while_an_engine_starts_again_checks_are_unjudged(serve: Serve) -> None:
    engine = MortalEngine()
    engine.may_start.clear()
    client = serve(engine)
    killed = client.post("/v1/check", json=FINE | {"rules": ["fine", "kill"]})
    meanwhile = client.post("/v1/check", json=FINE)
    assert "being started again" in meanwhile.json()["error"]
    for response in (killed, meanwhile):
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
    assert int(meanwhile.headers["retry-after"]) > 0
    assert "retry-after" not in killed.headers  # it would kill the next engine too
    assert probe(client) == (200, 503)
    engine.may_start.set()
    wait_until(lambda: client.get("/readyz").status_code == 200)
    assert client.post("/v1/check", json=FINE).status_code == 200
    started = 'guard_engine_restarts_total{outcome="started"} 1.0'
    assert started in client.get("/metrics").text


def test_a_caller_that_closes_the_connection_frees_the_engine(serve: Serve) -> None:
    engine = ToyEngine()
    engine.on_step = lambda: time.sleep(0.02)
    names = [f"rule {number}" for number in range(1000)]
    engine.rules |= dict.fromkeys(names, engine.rules["fine"])
    with waiting_caller(serve(engine), "/v1/check", {"messages": MESSAGES, "rules": names}):
        wait_until(lambda: len(engine.open) == 1)
    wait_until(lambda: engine.open == [], 15)  # it would have taken twenty seconds


def test_an_internal_reason_stays_on_this_machine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ToyEngine({"broken": 0.0, "long": 0.0})
    inside, said = "runs/tiny/broken: no such file", "it has 3,000 tokens and/or signs"
    refusals = {
        "broken": Refusal("broken", inside, "weights_unavailable", is_internal=True),
        "long": Refusal("long", said, "too_long"),
    }
    monkeypatch.setattr(engine, "_outcome", lambda name, _: refusals[name])
    broken, long = serve(engine).post("/v1/check", json={"messages": MESSAGES}).json()["unjudged"]
    assert broken["reason"] == "what answers it cannot be used now; the server's log says why"
    assert long["reason"] == said
    assert inside in caplog.text and said not in caplog.text


@pytest.mark.slow
def test_an_engine_that_hangs_keeps_nobody_waiting_and_is_not_healthy(serve: Serve) -> None:
    engine = ToyEngine()
    engine.may_step.clear()
    client = serve(engine, timeout_s=1.0)
    response = client.post("/v1/check", json=FINE)
    assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
    assert "took too long" in response.json()["error"]
    assert probe(client) == (503, 503)
    engine.may_step.set()
    # On a busy machine one check may take longer than this server lets it.
    wait_until(lambda: client.post("/v1/check", json=FINE).status_code == 200)


def test_of_several_texts_few_are_begun_and_none_after_the_time_is_over(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0})
    engine.may_step.clear()
    client = serve(engine)
    body = {"input": [f"text {number}" for number in range(4 * TEXTS_AT_ONCE)]}
    # Long enough for a busy machine to read the body in it.
    late = client.post("/v1/moderations", json=body, headers={"guard-timeout-ms": "1000"})
    assert late.status_code == 503
    engine.may_step.set()
    wait_until(lambda: client.get("/readyz").status_code == 200)
    generous = {"guard-timeout-ms": "999999999"}
    assert client.post("/v1/check", json=FINE, headers=generous).status_code == 200
    assert client.post("/v1/moderations", json={"input": "last"}).status_code == 200
    begun = {messages[0].content for messages in engine.conversations}
    assert begun <= {*body["input"][:TEXTS_AT_ONCE], MESSAGES[0]["content"], "last"}


def test_a_rule_without_weights_is_not_found_and_the_command_that_trains_it_is_named(
    serve: Serve,
) -> None:
    engine = ToyEngine({"fine": -2.0, "flagged": -1.0})
    other = vars(engine.rules["fine"]) | {"model": "minilm", "method": "lora"}
    engine.rules["flagged"] = SimpleNamespace(**other)
    response = serve(engine).post("/admin/rules/new")
    tiny = "`make train RULE=new MODEL=tiny METHOD=alora`"
    both = f"{tiny}, `make train RULE=new MODEL=minilm METHOD=lora`"
    assert response.status_code == 404 and f"; one of {both} trains it" in response.json()["error"]
    merged_card = SimpleNamespace(**vars(engine.rules["fine"]) | {"merged_revision": "a" * 64})
    engine.rules = {"fine": merged_card}
    merged = serve(engine).post("/admin/rules/new")
    assert merged.status_code == 404 and "make train" not in merged.text
    assert "the merged base here answers what it was started with" in merged.json()["error"]


def test_observers_are_told_of_every_check_and_closed_with_the_server() -> None:
    records, engine = Records(), ToyEngine()
    engine.on_step = lambda: time.sleep(0.05)
    with serving(create_app(engine, observers=[records])) as client:  # type: ignore[arg-type]
        for rules in (["fine"], ["crash"]):
            client.post("/v1/check", json={"messages": MESSAGES, "rules": rules})
        # A check beside one that fails is answered: its caller is not gone.
        texts = {"input": ["breaks", "Hi"], "model": "fine"}
        assert client.post("/v1/moderations", json=texts).status_code == 503
        assert not records.is_closed
    assert records.is_closed
    failed = "engine_failed"
    assert [record.failure for record in records.kept] == [None, failed, failed, None]
    assert [list(record.cards) for record in records.kept] == [["fine"], ["crash"], *[["fine"]] * 2]
    for record in records.kept:
        assert record.verdict == "unjudged" and 0 < record.latency_s < 60
