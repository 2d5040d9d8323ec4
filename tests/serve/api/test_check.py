"""Our own wire format over HTTP: the engine's verdicts, and never an "allow" without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from serve.api.limits import MAX_CHARACTERS, MAX_MESSAGES, MAX_RULES
from tests.serve.guarded import CONVERSATION, RULE_TEXTS, guard_engine
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(guard_engine())) as client:
        yield client


def test_a_check_over_http_is_the_engine_s(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/check", json={"messages": MESSAGES, "rules": ["pii_leak", "plain"]}
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
    """The engine itself, while the server has nothing to do: only one may use it at a time."""
    return guard_engine().check(CONVERSATION, rules)


def test_every_rule_is_checked_if_none_is_named(client: httpx.Client) -> None:
    answer = client.post("/v1/check", json={"messages": MESSAGES}).json()
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
        "/v1/check", json={"messages": MESSAGES, "rules": ["plain", "no_such_rule"]}
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
    assert [rule["rule"] for rule in answer["unjudged"]] == list(RULE_TEXTS)


MALFORMED = {
    "messages: Field required": {},
    "messages: List should have at least 1 item": {"messages": []},
    "messages.0.role": {"messages": [{"role": "root", "content": "hi"}]},
    "messages.0.content": {"messages": [{"role": "user", "content": None}]},
    "messages.1.name: Extra inputs": {
        "messages": [*MESSAGES[:1], {"role": "user", "content": "hi", "name": "x"}]
    },
    "rules: List should have at least 1 item": {"messages": MESSAGES, "rules": []},
    "rules: Value error, a rule is named twice": {
        "messages": MESSAGES,
        "rules": ["plain", "plain"],
    },
    "rules.0": {"messages": MESSAGES, "rules": [1]},
    "threshold: Extra inputs": {"messages": MESSAGES, "threshold": 0.1},
    "messages: List should have at most 10000 items": {
        "messages": MESSAGES[:1] * (MAX_MESSAGES + 1)
    },
    "rules: List should have at most 1000 items": {
        "messages": MESSAGES,
        "rules": [str(number) for number in range(MAX_RULES + 1)],
    },
    "the limit is": {"messages": [{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}]},
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_malformed_request_is_told_what_is_wrong_and_gets_no_verdict(
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


def test_the_rules_are_listed_with_wording_and_threshold(client: httpx.Client) -> None:
    rules = {rule["rule"]: rule for rule in client.get("/v1/rules").json()}
    assert {name: rule["text"] for name, rule in rules.items()} == RULE_TEXTS
    assert rules["plain"]["threshold"] == 0.25


def test_a_salt_reaches_the_engine_and_an_empty_one_is_refused() -> None:
    engine = ToyEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        for salt in ({"cache_salt": "tenant 7"}, {}):
            assert (
                client.post(
                    "/v1/check", json={"messages": MESSAGES, "rules": ["fine"], **salt}
                ).status_code
                == 200
            )
        response = client.post(
            "/v1/check", json={"messages": MESSAGES, "rules": ["fine"], "cache_salt": ""}
        )
        assert response.status_code == 422 and "cache_salt" in response.json()["error"]
    assert engine.salts == ["tenant 7", None]
