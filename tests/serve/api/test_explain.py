"""A violation names the turn that carries it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from serve.api.input.limits import MAX_TURNS
from tests.serve.client.censor import Censor
from tests.serve.serving import serving

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> Censor:
    return Censor()


@pytest.fixture
def client(engine: Censor) -> Iterator[httpx.Client]:
    with serving(create_app(engine)) as client:
        yield client


def asked(client: httpx.Client, *contents: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content} for content in contents]
    return client.post("/v1/check", json={"messages": messages} | body)


@pytest.mark.parametrize("turn", [0, 1, 4])
def test_a_violated_rule_names_its_turn_and_no_other_rule_does(
    client: httpx.Client, turn: int
) -> None:
    contents = ["hello"] * 5
    contents[turn] = "forbidden"
    answer = asked(client, *contents, explain=True).json()
    assert answer["verdict"] == "violation"
    (explanation,) = answer["explanations"].values()
    assert answer["explanations"].keys() == {"words"} and explanation["turn"] == turn
    assert explanation["p_after"] > 0.9
    assert ("p_before" in explanation) == (turn > 0)
    assert explanation.get("p_before", 0.0) < 0.1


def test_only_violated_rules_are_asked_again(client: httpx.Client, engine: Censor) -> None:
    assert asked(client, "hello", "good day", explain=True).json()["explanations"] == {}
    assert len(engine.conversations) == 1
    assert "explanations" not in asked(client, "hello", "forbidden").json()
    assert len(engine.conversations) == 2


def test_what_could_not_be_judged_has_no_explanation(client: httpx.Client) -> None:
    answer = asked(client, "hello", "cannot be judged", "forbidden", explain=True).json()
    assert answer["verdict"] == "unjudged" and answer["explanations"] == {}


def test_where_explaining_fails_the_verdict_is_answered_without(client: httpx.Client) -> None:
    response = asked(client, "hello", "breaks", "forbidden", explain=True)
    assert response.status_code == 200 and response.json()["verdict"] == "violation"
    assert "explanations" not in response.json()


def test_too_many_turns_are_refused_at_once(client: httpx.Client, engine: Censor) -> None:
    response = asked(client, *["a"] * (MAX_TURNS + 1), explain=True)
    assert response.status_code == 422 and "can be explained" in response.text
    assert not engine.conversations
