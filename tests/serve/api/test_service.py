"""A check ends when its caller is gone, when the engine hangs, and when one beside it fails."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve.api.app import create_app
from serve.api.input.limits import TEXTS_AT_ONCE
from serve.engine import Refusal
from serve.engine.rules import part_of_base
from tests.serve.api.observe.toy_record import Records
from tests.serve.serving import MESSAGES, Serve, serving, waiting_caller
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

FINE = {"messages": MESSAGES, "rules": ["fine"]}


def test_a_caller_that_closes_the_connection_frees_the_engine(serve: Serve) -> None:
    engine = ToyEngine()
    engine.on_step = lambda: time.sleep(0.02)
    names = [f"rule {number}" for number in range(1000)]
    engine.rules |= dict.fromkeys(names, engine.rules["fine"])
    with waiting_caller(serve(engine), "/v1/check", {"messages": MESSAGES, "rules": names}):
        wait_until(lambda: len(engine.open) == 1)
    wait_until(lambda: engine.open == [], 15)  # it would have taken twenty seconds


@pytest.mark.slow
def test_an_engine_that_hangs_keeps_nobody_waiting_and_is_not_healthy(serve: Serve) -> None:
    engine = ToyEngine()
    engine.may_step.clear()
    client = serve(engine, timeout_s=1.0)
    response = client.post("/v1/check", json=FINE)
    assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
    assert "took too long" in response.json()["error"]
    for path in ("/health", "/healthz", "/readyz"):
        assert client.get(path).status_code == 503
    engine.may_step.set()
    wait_until(lambda: client.get("/health").status_code == 200)
    # On a busy machine one check may take longer than this server lets it.
    wait_until(lambda: client.post("/v1/check", json=FINE).status_code == 200)


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
    unjudged = serve(engine).post("/v1/check", json={"messages": MESSAGES}).json()["unjudged"]
    reasons = {rule["rule"]: rule["reason"] for rule in unjudged}
    assert reasons["long"] == said
    assert reasons["broken"] == "what answers it cannot be used now; the server's log says why"
    assert inside in caplog.text and said not in caplog.text


def test_of_several_texts_few_are_begun_and_none_after_the_time_is_over(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0})
    engine.may_step.clear()
    client = serve(engine)
    body = {"input": [f"text {number}" for number in range(4 * TEXTS_AT_ONCE)]}
    # Long enough for a busy machine to read the body in it.
    late = client.post("/v1/moderations", json=body, headers={"guard-timeout-ms": "1000"})
    assert late.status_code == 503
    engine.may_step.set()
    wait_until(lambda: client.get("/health").status_code == 200)
    generous = {"guard-timeout-ms": "999999999"}
    assert client.post("/v1/check", json=FINE, headers=generous).status_code == 200
    assert client.post("/v1/moderations", json={"input": "last"}).status_code == 200
    begun = {messages[0].content for messages in engine.conversations}
    assert begun <= {*body["input"][:TEXTS_AT_ONCE], MESSAGES[0]["content"], "last"}


def test_a_rule_without_weights_is_not_found_and_the_command_that_trains_it_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine({"fine": -2.0, "flagged": -1.0})
    other = vars(engine.rules["fine"]) | {"model": "minilm", "method": "lora"}
    engine.rules["flagged"] = SimpleNamespace(**other)
    response = serve(engine).post("/admin/rules/new")
    tiny = "`make train RULE=new MODEL=tiny METHOD=alora`"
    minilm = "`make train RULE=new MODEL=minilm METHOD=lora`"
    assert response.status_code == 404
    assert f"; one of {tiny}, {minilm} trains it" in response.json()["error"]
    del engine.rules["flagged"]
    assert f"; {tiny} trains it" in serve(engine).post("/admin/rules/new").json()["error"]

    def no_folder(rule: str) -> Path:
        raise part_of_base(rule)

    monkeypatch.setattr(engine, "folder", no_folder)  # as the only rule of a merged base
    response = serve(engine).post("/admin/rules/new")
    assert response.status_code == 404
    assert "the merged base here answers its own rule alone" in response.json()["error"]
    assert "make train" not in response.json()["error"]


def test_observers_are_told_of_every_check_and_closed_with_the_server() -> None:
    records = Records()
    app = create_app(ToyEngine(), observers=[records])  # type: ignore[arg-type]
    with serving(app) as client:
        for rules in (["fine"], ["crash"]):
            client.post("/v1/check", json={"messages": MESSAGES, "rules": rules})
        assert not records.is_closed
    assert records.is_closed
    assert [record.failure for record in records.kept] == [None, "engine_failed"]
    assert [record.verdict for record in records.kept] == ["unjudged"] * 2
    assert [list(record.cards) for record in records.kept] == [["fine"], ["crash"]]
    assert all(0 < record.latency_s < 60 for record in records.kept)


def test_a_check_beside_one_that_fails_is_answered_and_its_caller_is_not_gone(
    serve: Serve,
) -> None:
    engine, records = ToyEngine({"fine": -2.0}), Records()
    engine.on_step = lambda: time.sleep(0.1)
    client = serve(engine, observers=[records])
    assert client.post("/v1/moderations", json={"input": ["breaks", "Hi"]}).status_code == 503
    assert [record.failure for record in records.kept] == ["engine_failed", None]
