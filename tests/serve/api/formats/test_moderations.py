"""Moderations over HTTP, asked by OpenAI's own client: a rule is a category."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.input.limits import MAX_TEXTS
from serve.engine import GuardEngine
from serve.engine.codes import CODES
from tests.serve.api.formats.toy_rule_sets import LOGITS, RULE_SETS
from tests.serve.cards import RULE_TEXTS
from tests.serve.serving import openai_client, serving
from tests.serve.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def engine() -> ToyEngine:
    return ToyEngine(LOGITS)


@pytest.fixture(scope="module")
def client(engine: ToyEngine) -> Iterator[httpx.Client]:
    with serving(create_app(engine, rule_sets=RULE_SETS)) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture
def sdk(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai_client(client) as sdk:
        yield sdk


def test_every_rule_is_a_category_by_the_threshold_of_its_card(sdk: openai.OpenAI) -> None:
    response = sdk.moderations.create(input="My knee hurts.")
    (result,) = response.results
    assert response.model == "omni-moderation-latest"
    assert result.flagged
    assert result.categories.to_dict() == {"flagged": True, "fine": False}
    assert result.category_scores.to_dict() == pytest.approx(
        {"flagged": 1 / (1 + math.e), "fine": 1 / (1 + math.e**2)}
    )
    assert result.category_applied_input_types.to_dict() == {"flagged": ["text"], "fine": ["text"]}


def test_a_model_that_is_a_rule_s_name_is_that_rule_alone(sdk: openai.OpenAI) -> None:
    (result,) = sdk.moderations.create(input="Hi", model="fine").results
    assert not result.flagged and result.categories.to_dict() == {"fine": False}


def test_several_texts_have_a_result_each_in_their_order(
    engine: ToyEngine, sdk: openai.OpenAI
) -> None:
    engine.conversations.clear()
    texts = [f"text {number}" for number in range(40)]
    response = sdk.moderations.create(input=texts, model="fine")
    assert len(response.results) == 40
    judged = [messages[0] for messages in engine.conversations]
    assert judged == [Message("user", text) for text in texts]


def test_content_parts_are_one_text(engine: ToyEngine, sdk: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert len(sdk.moderations.create(input=parts).results) == 1
    assert engine.conversations[-1] == (Message("user", "One.\nTwo."),)


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ("cannot be judged", "2 of 2 rules; flagged: it does not fit"),
        (["Hi", "cannot be judged"], "text 2 of 2: 2 of 2 rules"),
        (["Hi", " ", "Ho"], "text 2 of 3"),
        ([{"type": "text", "text": "Look:"}, IMAGE], "1 of 2 rules; fine: message 0 has an image"),
    ],
)
def test_what_cannot_be_judged_has_no_result_at_all(
    sdk: openai.OpenAI, texts: Any, why: str
) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        sdk.moderations.create(input=texts)
    assert raised.value.code in CODES and why in raised.value.message


def test_a_model_that_is_no_rule_is_not_found(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        sdk.moderations.create(input="Hi", model="no_such_rule")
    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [{}, {"input": []}, {"input": ["x"] * (MAX_TEXTS + 1)}, {"input": 7}, {"input": "Hi", "n": 1}],
)
def test_a_malformed_request_is_a_bad_request(client: httpx.Client, body: dict[str, Any]) -> None:
    response = client.post("/v1/moderations", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_one_text_that_the_engine_fails_on_leaves_no_result_of_the_others() -> None:
    with serving(create_app(ToyEngine())) as client, openai_client(client) as sdk:  # type: ignore[arg-type]
        with pytest.raises(openai.InternalServerError) as raised:
            sdk.moderations.create(input=["one", "two"], model="crash")
        assert raised.value.status_code == 503
        assert client.get("/health").status_code == 200


@pytest.mark.slow
def test_a_moderation_is_the_engine_s_verdicts(mixed_engine: GuardEngine) -> None:
    expected = mixed_engine.check([Message("user", "Call me at 555 0100.")]).verdicts
    with serving(create_app(mixed_engine)) as client, openai_client(client) as sdk:
        (result,) = sdk.moderations.create(input="Call me at 555 0100.").results
    categories, scores = result.categories.to_dict(), result.category_scores.to_dict()
    assert set(categories) == set(RULE_TEXTS)
    assert {*categories.values()} == {True, False}
    for verdict in expected:
        assert scores[verdict.rule] == pytest.approx(verdict.p_violation, abs=1e-4)
        assert categories[verdict.rule] == verdict.violates


def test_a_model_that_is_a_rule_set_is_flagged_by_its_logic(sdk: openai.OpenAI) -> None:
    (result,) = sdk.moderations.create(input="Hi", model="both").results
    assert not result.flagged
    assert result.categories.to_dict() == {"flagged": True, "fine": False}
    with pytest.raises(openai.UnprocessableEntityError) as unstated:
        sdk.moderations.create(input="Hi", model="staff")
    assert unstated.value.code == "metadata_missing"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "input: Input should be a valid string or a valid list, got 7"),
        (None, "input: Input should be a valid string or a valid list, got null"),
        (["Hi", 7], "input.1: Input should be a valid string, got 7"),
        ([{"type": "text", "text": 7}], "input.0.text: Input should be a valid string, got 7"),
    ],
)
def test_a_wrong_input_is_said_without_the_names_of_types(
    client: httpx.Client, value: Any, message: str
) -> None:
    response = client.post("/v1/moderations", json={"input": value})
    assert response.json()["error"]["message"] == message
