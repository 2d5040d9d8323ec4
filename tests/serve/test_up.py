"""The guardrail server over real HTTP: the engine's verdicts, nobody else's, and never an "allow" where there is no verdict."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from serve.engine import Call, OpenCheck, Refusal
from serve.engine.thread import MAX_OPEN, MAX_QUEUED, EngineThread, Overloaded
from serve.up import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_RULES,
    MAX_TURNS,
    _listening,
    _warm_up,
    create_app,
    main,
)
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
            with httpx.Client(
                base_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
                timeout=300,
                trust_env=False,
            ) as client:
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
    answer = client.post(
        "/v1/check", json={"messages": TURNS, "rules": ["pii_leak", "plain"]}
    ).json()
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
        {
            "messages": [{"role": "user", "content": f"number {number} " * (number % 7 + 1)}],
            "rules": rules[number % 4 :] or rules,
        }
        for number in range(24)
    ]
    alone = [client.post("/v1/check", json=body).json() for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: client.post("/v1/check", json=body).json(), bodies))
    for first, second in zip(alone, together, strict=True):
        assert [result["rule"] for result in first["results"]] == [
            result["rule"] for result in second["results"]
        ]
        expected = [result["p_violation"] for result in first["results"]]
        assert [result["p_violation"] for result in second["results"]] == pytest.approx(
            expected, abs=1e-3
        )


def test_a_rule_that_is_not_served_is_named_and_nothing_is_judged(client: httpx.Client) -> None:
    response = client.post(
        "/v1/check", json={"messages": TURNS, "rules": ["plain", "no_such_rule"]}
    )
    assert response.status_code == 422
    assert response.json() == {
        "verdict": "unjudged",
        "error": "rules: not served: no_such_rule; GET /v1/rules lists them",
    }


def test_a_conversation_that_does_not_fit_is_unjudged_for_every_rule(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/check", json={"messages": [{"role": "user", "content": "word " * 3000}]}
    ).json()
    assert answer["verdict"] == "unjudged" and answer["results"] == []
    assert [each["rule"] for each in answer["unjudged"]] == list(RULE_TEXTS)


MALFORMED = {
    "messages: Field required": {},
    "messages: List should have at least 1 item": {"messages": []},
    "messages.0.role": {"messages": [{"role": "root", "content": "hi"}]},
    "messages.0.content": {"messages": [{"role": "user", "content": None}]},
    "messages.1.name: Extra inputs": {
        "messages": [*TURNS[:1], {"role": "user", "content": "hi", "name": "x"}]
    },
    "rules: List should have at least 1 item": {"messages": TURNS, "rules": []},
    "rules: Value error, a rule is named twice": {"messages": TURNS, "rules": ["plain", "plain"]},
    "rules.0": {"messages": TURNS, "rules": [1]},
    "threshold: Extra inputs": {"messages": TURNS, "threshold": 0.1},
    "messages: List should have at most 10000 items": {"messages": TURNS[:1] * (MAX_TURNS + 1)},
    "rules: List should have at most 1000 items": {
        "messages": TURNS,
        "rules": [str(number) for number in range(MAX_RULES + 1)],
    },
    "the limit is": {"messages": [{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}]},
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_malformed_question_is_told_what_is_wrong_and_gets_no_verdict(
    client: httpx.Client, error: str
) -> None:
    response = client.post("/v1/check", json=MALFORMED[error])
    assert response.status_code == 422
    assert error in response.json()["error"]
    assert response.json()["verdict"] == "unjudged"


def test_half_a_surrogate_pair_is_unjudged_and_not_a_crash(client: httpx.Client) -> None:
    body = '{"messages": [{"role": "user", "content": "\\ud800"}], "rules": ["plain"]}'
    response = client.post("/v1/check", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422 and response.json()["verdict"] == "unjudged"


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        (
            '{"messages": oops}',
            "application/json",
            "the body is not JSON: Expecting value at character 13",
        ),
        (
            '{"messages": []}',
            "text/plain",
            "the body must be a JSON object, sent with `content-type: application/json`",
        ),
        ("[]", "application/json", "the body must be a JSON object"),
        ("", "application/json", "the body must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_told_so(
    client: httpx.Client, content: str, kind: str, error: str
) -> None:
    response = client.post("/v1/check", content=content, headers={"content-type": kind})
    assert response.status_code == 422
    assert response.json()["verdict"] == "unjudged" and response.json()["error"].startswith(error)


def test_a_wrong_method_or_path_has_no_verdict_and_says_where_calls_are_described(
    client: httpx.Client,
) -> None:
    wrong = client.get("/v1/check")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json() == {
        "verdict": "unjudged",
        "error": "Method Not Allowed; GET /docs describes the calls",
    }
    assert client.get("/v1/checks").status_code == 404


def test_the_rules_are_listed_with_wording_and_threshold(client: httpx.Client) -> None:
    rules = {rule["rule"]: rule for rule in client.get("/v1/rules").json()}
    assert {name: rule["text"] for name, rule in rules.items()} == RULE_TEXTS
    assert rules["plain"]["threshold"] == 0.25


def test_health_is_ok_while_checks_are_served(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}


class ToyEngine:
    """Answers a check of n rules after n steps, with refusals; a rule called "crash" breaks the batch it is in."""

    def __init__(self) -> None:
        card = SimpleNamespace(rule_text="Be nice.", threshold=0.5, weights_sha256="0")
        self.rules = {"crash": card, "fine": card}
        self.is_usable = True
        self.open: list[tuple[list[str], Call]] = []
        self.salts: list[str | None] = []
        self.on_step: Callable[[], object] = lambda: None
        self.may_step = threading.Event()
        self.may_step.set()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        self.salts.append(cache_salt)
        names = list(rules or ())
        asked = Call([None] * len(names), {name: (place, 0.0) for place, name in enumerate(names)})
        self.open.append((names[:], asked))
        return OpenCheck(tuple(names), {}, asked)

    def step(self) -> None:
        assert self.may_step.wait(10)
        self.on_step()
        for names, asked in self.open:
            if "crash" in names:
                raise RuntimeError("the batch broke")
            if names:
                name = names.pop(0)
                place, _ = asked.waiting.pop(name)
                asked.outcomes[place] = Refusal(name, f"toy answer for {name}")

    def cancel(self, asked: Call) -> None:
        asked.waiting.clear()
        self.open = [(names, other) for names, other in self.open if other is not asked]


@pytest.fixture
def toy() -> Iterator[tuple[ToyEngine, EngineThread]]:
    engine = ToyEngine()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    yield engine, thread
    engine.may_step.set()
    thread.close()


def test_a_short_check_does_not_wait_for_a_long_one_that_came_before(
    toy: tuple[ToyEngine, EngineThread],
) -> None:
    engine, thread = toy
    engine.may_step.clear()
    long, short = (
        thread.check((), [f"rule {number}" for number in range(50)]),
        thread.check((), ["short"]),
    )
    done: list[str] = []
    long.add_done_callback(lambda _: done.append("long"))
    short.add_done_callback(lambda _: done.append("short"))
    engine.may_step.set()
    assert len(long.result(10).refused) == 50 and list(short.result(10).refused) == ["short"]
    assert done == ["short", "long"]


def test_a_batch_that_breaks_fails_its_checks_and_not_the_later_ones(
    toy: tuple[ToyEngine, EngineThread],
) -> None:
    _, thread = toy
    with pytest.raises(GuardError, match="the batch broke"):
        thread.check((), ["crash"]).result(10)
    assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
    assert thread.is_alive


def test_no_more_checks_are_begun_than_the_engine_is_to_hold_and_the_others_wait(
    toy: tuple[ToyEngine, EngineThread],
) -> None:
    engine, thread = toy
    engine.may_step.clear()
    futures = [thread.check((), ["one", "two"]) for _ in range(3 * MAX_OPEN)]
    most: list[int] = []
    engine.on_step = lambda: most.append(len([names for names, _ in engine.open if names]))
    engine.may_step.set()
    assert all(len(future.result(10).refused) == 2 for future in futures)
    assert max(most) == MAX_OPEN


def test_a_batch_runs_although_checks_keep_coming_in(
    toy: tuple[ToyEngine, EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = toy
    put: list[Any] = []

    def one_more_for_each(*asked: Any, **options: Any) -> OpenCheck:
        if len(put) < MAX_QUEUED:
            put.append(thread.check((), ["fine"]))
        return ToyEngine.open_check(engine, *asked, **options)

    monkeypatch.setattr(engine, "open_check", one_more_for_each)
    steps: list[int] = []
    engine.on_step = lambda: steps.append(len(put))
    thread.check((), ["fine"]).result(10)
    assert steps[0] <= 2  # it, and the one that came in meanwhile


def test_a_batch_does_not_wait_for_all_that_take_long_to_open(
    toy: tuple[ToyEngine, EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = toy
    opened: list[float] = []

    def slow(*asked: Any, **options: Any) -> OpenCheck:
        time.sleep(0.03)
        opened.append(time.monotonic())
        return ToyEngine.open_check(engine, *asked, **options)

    monkeypatch.setattr(engine, "open_check", slow)
    engine.may_step.clear()
    first = thread.check((), ["fine"])
    while not opened:
        time.sleep(0.001)
    futures = [thread.check((), ["fine"]) for _ in range(20)]
    opened_before_a_step: list[int] = []
    engine.on_step = lambda: opened_before_a_step.append(len(opened))
    engine.may_step.set()
    for future in (first, *futures):
        future.result(10)
    steps = [0, *opened_before_a_step]
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 4


class Stubborn(ToyEngine):
    """A toy engine that cannot even clear away what failed."""

    def cancel(self, asked: Call) -> None:
        raise RuntimeError("nothing works any more")


def test_a_thread_that_cannot_go_on_fails_everyone_who_waits_and_says_that_it_is_down() -> None:
    engine = Stubborn()
    engine.may_step.clear()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    futures = [thread.check((), ["crash"]) for _ in range(MAX_OPEN + 5)]
    engine.may_step.set()
    for future in futures:
        with pytest.raises(GuardError, match=r"the batch broke|nothing works any more"):
            future.result(10)
    thread.close()
    assert not thread.is_alive
    with pytest.raises(Overloaded, match="its engine has failed"):
        thread.check((), ["fine"])


def test_an_engine_that_hangs_does_not_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.engine.thread.CLOSING_S", 0.1)
    engine, held = ToyEngine(), threading.Event()
    engine.on_step = lambda: held.wait(30)
    thread = EngineThread(engine, timeout_s=0.3)  # type: ignore[arg-type]
    futures = [thread.check((), ["fine"]) for _ in range(3)]
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 5
    for future in futures:
        with pytest.raises(Overloaded, match="took too long"):
            future.result(0)
    assert thread._thread.daemon  # so that the process ends without it
    held.set()


def test_a_check_whose_result_cannot_be_made_fails_alone(
    toy: tuple[ToyEngine, EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, thread = toy
    with monkeypatch.context() as patch:
        patch.setattr(OpenCheck, "result", lambda self: 1 / 0)
        with pytest.raises(GuardError, match="division by zero"):
            thread.check((), ["fine"]).result(10)
    assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]


def test_a_thread_whose_engine_could_not_be_cleared_takes_no_more_checks(
    toy: tuple[ToyEngine, EngineThread],
) -> None:
    engine, thread = toy
    engine.is_usable = False
    assert not thread.is_alive
    with pytest.raises(Overloaded, match="its engine has failed"):
        thread.check((), ["fine"])


def test_closing_finishes_what_is_under_way_and_refuses_what_comes_later(
    toy: tuple[ToyEngine, EngineThread],
) -> None:
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


def test_more_checks_than_the_queue_holds_are_refused_at_once(
    toy: tuple[ToyEngine, EngineThread],
) -> None:
    engine, thread = toy
    engine.may_step.clear()
    with pytest.raises(Overloaded, match="too many"):
        for _ in range(2 * MAX_QUEUED + 2):
            thread.check((), ["rule"])


def test_a_check_that_takes_too_long_is_dropped_wherever_it_is() -> None:
    """In the engine or still waiting; and those that come later are answered."""
    engine = ToyEngine()
    thread = EngineThread(engine, timeout_s=0.3)  # type: ignore[arg-type]
    try:
        engine.on_step = lambda: time.sleep(0.02)
        opened = thread.check((), [f"rule {number}" for number in range(1000)])
        for _ in range(MAX_OPEN):
            thread.check((), [f"rule {number}" for number in range(1000)])
        waiting = thread.check((), ["one"])
        for future in (opened, waiting):
            with pytest.raises(Overloaded, match=r"took too long.*--timeout"):
                future.result(10)
        assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
        assert len(engine.open) == 1  # the last; of the others nothing is left
    finally:
        thread.close()


def test_what_nobody_waits_for_any_more_is_dropped(toy: tuple[ToyEngine, EngineThread]) -> None:
    engine, thread = toy
    engine.on_step = lambda: time.sleep(0.01)
    future = thread.check((), [f"rule {number}" for number in range(1000)])
    while not engine.open:
        time.sleep(0.001)
    thread.give_up(future)
    with pytest.raises(GuardError, match="the caller is gone"):
        future.result(2)
    assert engine.open == []
    thread.give_up(future)  # it is answered: nothing is left to do


def test_a_caller_that_closes_the_connection_frees_the_engine() -> None:
    engine = ToyEngine()
    engine.on_step = lambda: time.sleep(0.02)
    engine.rules |= {f"rule {number}": engine.rules["fine"] for number in range(1000)}
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/check",
                json={
                    "messages": TURNS,
                    "rules": [name for name in engine.rules if name[:4] == "rule"],
                },
                timeout=0.3,
            )
        assert len(engine.open) == 1
        began = time.monotonic()
        while engine.open and time.monotonic() < began + 5:
            time.sleep(0.01)
        assert engine.open == []  # it would have taken twenty seconds


def test_an_engine_that_hangs_keeps_nobody_waiting_and_is_not_healthy() -> None:
    engine = ToyEngine()
    engine.may_step.clear()
    with serving(create_app(engine, timeout_s=0.3)) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", json={"messages": TURNS, "rules": ["fine"]}, timeout=5)
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert "took too long" in response.json()["error"]
        assert client.get("/health").status_code == 503
        engine.may_step.set()
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        assert (
            client.post("/v1/check", json={"messages": TURNS, "rules": ["fine"]}).status_code == 200
        )


def test_an_error_that_nobody_expected_is_unjudged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        monkeypatch.setattr("serve.up.Answer.of", lambda _: 1 / 0)
        response = client.post("/v1/check", json={"messages": TURNS, "rules": ["fine"]})
        assert (response.status_code, response.json()["verdict"]) == (500, "unjudged")


def test_a_salt_reaches_the_engine_and_an_empty_one_is_refused() -> None:
    engine = ToyEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        for salt in ({"cache_salt": "tenant 7"}, {}):
            assert (
                client.post(
                    "/v1/check", json={"messages": TURNS, "rules": ["fine"], **salt}
                ).status_code
                == 200
            )
        response = client.post(
            "/v1/check", json={"messages": TURNS, "rules": ["fine"], "cache_salt": ""}
        )
        assert response.status_code == 422 and "cache_salt" in response.json()["error"]
    assert engine.salts == ["tenant 7", None]


def test_more_requests_than_may_be_under_way_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.up.MAX_REQUESTS", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    question = {"messages": TURNS, "rules": ["fine"]}
    with serving(create_app(engine)) as client, ThreadPoolExecutor(1) as other:  # type: ignore[arg-type]
        under_way = other.submit(client.post, "/v1/check", json=question)
        while not engine.open:
            time.sleep(0.001)
        response = client.post("/v1/check", json=question)
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert client.get("/health").status_code == 200
        engine.may_step.set()
        assert under_way.result(10).status_code == 200
        assert client.post("/v1/check", json=question).status_code == 200


@pytest.mark.parametrize("stated", [True, False])
def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(
    client: httpx.Client, stated: bool
) -> None:
    whole = b" " * (MAX_BYTES + 1)
    parts = (
        whole if stated else (whole[start : start + 2**20] for start in range(0, len(whole), 2**20))
    )
    response = client.post("/v1/check", content=parts, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
    assert client.post("/v1/check", json={"messages": TURNS, "rules": ["plain"]}).status_code == 200


def test_a_failing_engine_is_a_503_without_a_verdict() -> None:
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", json={"messages": TURNS, "rules": ["crash"]})
        assert response.status_code == 503
        assert response.json()["verdict"] == "unjudged"
        assert "the batch broke" in response.json()["error"]
        assert (
            client.post("/v1/check", json={"messages": TURNS, "rules": ["fine"]}).status_code == 200
        )


def test_a_server_whose_rules_cannot_answer_does_not_start() -> None:
    refused = {"fine": Refusal("verdict", "the logit is nan")}
    engine = SimpleNamespace(check=lambda _: SimpleNamespace(refused=refused))
    with pytest.raises(GuardError, match=r"fine: the logit is nan.*make train RULE=fine"):
        _warm_up(engine)  # type: ignore[arg-type]


def test_a_port_in_use_is_found_before_the_engine_starts() -> None:
    with _listening("127.0.0.1", 0) as taken, pytest.raises(GuardError, match="PORT="):
        _listening("127.0.0.1", taken.getsockname()[1])


def test_without_trained_rules_the_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["up", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "make train" in capsys.readouterr().err
