"""The guardrail server over real HTTP: the engine's verdicts, nobody else's, and never an "allow" where there is no verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from guard.errors import GuardError
from guard.example import Message
from serve.engine import Asked, OpenCheck, Refusal
from serve.engine_thread import MAX_QUEUED, EngineThread, Overloaded
from serve.up import MAX_CHARACTERS, _listening, create_app, main
from tests.serve.guarded import CONVERSATION, RULE_TEXTS, guard_engine

TURNS = [{"role": message.role, "content": message.content} for message in CONVERSATION]


@contextmanager
def serving(app: FastAPI) -> Iterator[httpx.Client]:
    """The app on a free port of this machine, and a client of it; stopped as a signal would."""
    with _listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=300, trust_env=False) as client:
                while not server.started:
                    time.sleep(0.01)
                yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(guard_engine())) as client:
        yield client


def test_a_check_over_http_is_the_engine_s(client: httpx.Client) -> None:
    answer = client.post("/v1/check", json={"messages": TURNS, "rules": ["pii_leak", "plain"]}).json()
    direct = guard_engine_check(["pii_leak", "plain"])
    assert [result["rule"] for result in answer["results"]] == ["pii_leak", "plain"]
    for result, verdict in zip(answer["results"], direct.verdicts, strict=True):
        assert result["p_violation"] == pytest.approx(verdict.p_violation, abs=1e-4)
        assert result["threshold"] == 0.25
        assert result["verdict"] == ("violation" if verdict.violates else "allow")
    assert answer["verdict"] == direct.outcome
    assert answer["unjudged"] == [] and answer["latency_ms"] > 0
    assert answer["usage"]["computed_tokens"] > 0


def guard_engine_check(rules: Sequence[str]) -> Any:
    """The engine asked directly, before the server owns it again: nothing else may use it meanwhile."""
    return guard_engine().check(CONVERSATION, rules)


def test_every_rule_is_checked_if_none_is_named(client: httpx.Client) -> None:
    answer = client.post("/v1/check", json={"messages": TURNS}).json()
    assert [result["rule"] for result in answer["results"]] == list(RULE_TEXTS)


def test_concurrent_checks_get_their_own_verdicts(client: httpx.Client) -> None:
    rules = list(RULE_TEXTS)
    bodies = [
        {"messages": [{"role": "user", "content": f"number {number} " * (number % 7 + 1)}], "rules": rules[number % 4 :] or rules}
        for number in range(24)
    ]
    alone = [client.post("/v1/check", json=body).json() for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: client.post("/v1/check", json=body).json(), bodies))
    for first, second in zip(alone, together, strict=True):
        assert [result["rule"] for result in first["results"]] == [result["rule"] for result in second["results"]]
        expected = [result["p_violation"] for result in first["results"]]
        assert [result["p_violation"] for result in second["results"]] == pytest.approx(expected, abs=1e-3)


def test_a_rule_that_is_not_served_is_unjudged_and_so_is_the_check(client: httpx.Client) -> None:
    response = client.post("/v1/check", json={"messages": TURNS, "rules": ["no_such_rule"]})
    assert response.status_code == 200
    assert response.json()["verdict"] == "unjudged"
    assert response.json()["unjudged"][0]["rule"] == "no_such_rule"
    assert "not served" in response.json()["unjudged"][0]["reason"]


def test_a_conversation_that_does_not_fit_is_unjudged_for_every_rule(client: httpx.Client) -> None:
    answer = client.post("/v1/check", json={"messages": [{"role": "user", "content": "word " * 3000}]}).json()
    assert answer["verdict"] == "unjudged" and answer["results"] == []
    assert [each["rule"] for each in answer["unjudged"]] == list(RULE_TEXTS)


MALFORMED = {
    "messages: Field required": {},
    "messages: List should have at least 1 item": {"messages": []},
    "messages.0.role": {"messages": [{"role": "root", "content": "hi"}]},
    "messages.0.content": {"messages": [{"role": "user", "content": None}]},
    "messages.1.name: Extra inputs": {"messages": [*TURNS[:1], {"role": "user", "content": "hi", "name": "x"}]},
    "rules: List should have at least 1 item": {"messages": TURNS, "rules": []},
    "rules: Value error, a rule is named twice": {"messages": TURNS, "rules": ["plain", "plain"]},
    "rules.0": {"messages": TURNS, "rules": [1]},
    "threshold: Extra inputs": {"messages": TURNS, "threshold": 0.1},
    "the limit is": {"messages": [{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}]},
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_malformed_question_is_told_what_is_wrong_and_gets_no_verdict(client: httpx.Client, error: str) -> None:
    response = client.post("/v1/check", json=MALFORMED[error])
    assert response.status_code == 422
    assert error in response.json()["error"]
    assert response.json()["verdict"] == "unjudged"


def test_half_a_surrogate_pair_is_unjudged_and_not_a_crash(client: httpx.Client) -> None:
    body = '{"messages": [{"role": "user", "content": "\\ud800"}], "rules": ["plain"]}'
    response = client.post("/v1/check", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422 and response.json()["verdict"] == "unjudged"


def test_a_body_that_is_not_json_is_a_422(client: httpx.Client) -> None:
    assert client.post("/v1/check", content="not json", headers={"content-type": "application/json"}).status_code == 422


def test_the_rules_are_listed_with_wording_and_threshold(client: httpx.Client) -> None:
    rules = {rule["rule"]: rule for rule in client.get("/v1/rules").json()}
    assert {name: rule["text"] for name, rule in rules.items()} == RULE_TEXTS
    assert rules["plain"]["threshold"] == 0.25


def test_health_is_ok_while_checks_are_served(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}


class ToyEngine:
    """Answers a check of n rules after n steps, with refusals; a rule called "crash" breaks the batch it is in."""

    def __init__(self) -> None:
        self.rules: dict[str, SimpleNamespace] = {}
        self.open: list[tuple[list[str], Asked]] = []
        self.may_step = threading.Event()
        self.may_step.set()

    def open_check(self, messages: Sequence[Message], rules: Sequence[str] | None) -> OpenCheck:
        names = list(rules or ())
        asked = Asked([None] * len(names), {name: (place, 0.0) for place, name in enumerate(names)})
        self.open.append((names[:], asked))
        return OpenCheck(tuple(names), {}, asked)

    def step(self) -> None:
        assert self.may_step.wait(10)
        for names, asked in self.open:
            if "crash" in names:
                raise RuntimeError("the batch broke")
            if names:
                name = names.pop(0)
                place, _ = asked.waiting.pop(name)
                asked.outcomes[place] = Refusal(name, f"toy answer for {name}")

    def cancel(self, asked: Asked) -> None:
        asked.waiting.clear()
        self.open = [(names, other) for names, other in self.open if other is not asked]


@pytest.fixture
def toy() -> Iterator[tuple[ToyEngine, EngineThread]]:
    engine = ToyEngine()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    yield engine, thread
    engine.may_step.set()
    thread.close()


def test_a_short_check_does_not_wait_for_a_long_one_that_came_before(toy: tuple[ToyEngine, EngineThread]) -> None:
    engine, thread = toy
    engine.may_step.clear()
    long, short = thread.check((), [f"rule {number}" for number in range(50)]), thread.check((), ["short"])
    done: list[str] = []
    long.add_done_callback(lambda _: done.append("long"))
    short.add_done_callback(lambda _: done.append("short"))
    engine.may_step.set()
    assert len(long.result(10).refused) == 50 and list(short.result(10).refused) == ["short"]
    assert done == ["short", "long"]


def test_a_batch_that_breaks_fails_its_checks_and_not_the_later_ones(toy: tuple[ToyEngine, EngineThread]) -> None:
    _, thread = toy
    with pytest.raises(GuardError, match="the batch broke"):
        thread.check((), ["crash"]).result(10)
    assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
    assert thread.is_alive


def test_closing_finishes_what_is_under_way_and_refuses_what_comes_later(toy: tuple[ToyEngine, EngineThread]) -> None:
    engine, thread = toy
    engine.may_step.clear()
    under_way = thread.check((), ["one", "two", "three"])
    closing = threading.Thread(target=thread.close)
    closing.start()
    while thread.is_alive:
        time.sleep(0.001)
    with pytest.raises(Overloaded):
        thread.check((), ["late"])
    engine.may_step.set()
    closing.join(10)
    assert list(under_way.result(0).refused) == ["one", "two", "three"]


def test_more_checks_than_the_queue_holds_are_refused_at_once(toy: tuple[ToyEngine, EngineThread]) -> None:
    engine, thread = toy
    engine.may_step.clear()
    with pytest.raises(Overloaded, match="too many"):
        for _ in range(2 * MAX_QUEUED + 2):
            thread.check((), ["rule"])


def test_a_failing_engine_is_a_503_without_a_verdict() -> None:
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", json={"messages": TURNS, "rules": ["crash"]})
        assert response.status_code == 503
        assert response.json()["verdict"] == "unjudged"
        assert "the batch broke" in response.json()["error"]
        assert client.post("/v1/check", json={"messages": TURNS, "rules": ["fine"]}).status_code == 200


def test_a_port_in_use_is_found_before_the_engine_starts() -> None:
    with _listening("127.0.0.1", 0) as taken, pytest.raises(GuardError, match="--port"):
        _listening("127.0.0.1", taken.getsockname()[1])


def test_without_trained_rules_the_command_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["up", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "make train" in capsys.readouterr().err
