"""Moderations over HTTP, asked by OpenAI's own client: a rule is a category."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.input.limits import MAX_TEXTS
from serve.engine.codes import CODES
from tests.serve.toy_engine import ToyEngine

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


def test_every_rule_is_a_category_by_the_threshold_of_its_card(sdk: openai.OpenAI) -> None:
    response = sdk.moderations.create(input="My knee hurts.")
    (result,) = response.results
    assert response.model == "omni-moderation-latest" and result.flagged
    assert result.categories.to_dict() == {"flagged": True, "fine": False}
    assert result.category_scores.to_dict() == pytest.approx(
        {"flagged": 1 / (1 + math.e), "fine": 1 / (1 + math.e**2)}
    )
    assert result.category_applied_input_types.to_dict() == {"flagged": ["text"], "fine": ["text"]}


def test_a_model_is_a_rule_or_a_rule_set_whose_logic_flags(sdk: openai.OpenAI) -> None:
    (fine,) = sdk.moderations.create(input="Hi", model="fine").results
    assert not fine.flagged and fine.categories.to_dict() == {"fine": False}
    (both,) = sdk.moderations.create(input="Hi", model="both").results
    assert not both.flagged and both.categories.to_dict() == {"flagged": True, "fine": False}
    with pytest.raises(openai.UnprocessableEntityError) as unstated:
        sdk.moderations.create(input="Hi", model="staff")
    assert unstated.value.code == "metadata_missing"
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.moderations.create(input="Hi", model="no_such_rule")
    assert unknown.value.code == "model_not_found"


def test_several_texts_have_a_result_each(engine: ToyEngine, sdk: openai.OpenAI) -> None:
    engine.conversations.clear()
    texts = [f"text {number}" for number in range(40)]
    assert len(sdk.moderations.create(input=texts, model="fine").results) == 40
    judged = [messages[0] for messages in engine.conversations]
    assert judged == [Message("user", text) for text in texts]
    parts: Any = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert len(sdk.moderations.create(input=parts).results) == 1
    assert engine.conversations[-1] == (Message("user", "One.\nTwo."),)


def test_a_malformed_request_is_told(client: Client) -> None:
    for body, why in (
        ({"input": ["x"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "Hi", "n": 1}, "n: there is no such key"),
        ({"input": 7}, "input: Input should be a valid string or a valid list, got 7"),
        ({"input": ["Hi", 7]}, "input.1: Input should be a valid string, got 7"),
    ):
        response = client.post("/v1/moderations", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith(why)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["Hi", "cannot be judged"], "text 2 of 2: 2 of 2 rules; flagged: it does not fit"),
        (["Hi", " ", "Ho"], "text 2 of 3"),
        ([{"type": "text", "text": "Look:"}, IMAGE], "1 of 2 rules; fine: message 0 has an image"),
    ],
)
def test_what_cannot_be_judged_has_no_result(sdk: openai.OpenAI, texts: Any, why: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        sdk.moderations.create(input=texts)
    assert raised.value.code in CODES and why in raised.value.message
