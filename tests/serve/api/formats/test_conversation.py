"""OpenAI's messages as a conversation: all that they say, or no verdict; and unknown keys."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from guard.conversation.chat import ChatMessage, ContentPart, PartlyRead
from guard.conversation.example import Message
from serve.api.errors import NAMED_PROBLEMS, Unjudged
from serve.api.formats.check import CheckRequest
from serve.api.formats.conversation import from_chat, from_text, openai_error
from serve.api.input.limits import MAX_CHARACTERS


def test_messages_texts_and_parts_are_turns() -> None:
    assert from_chat([ChatMessage(role="developer", content="Hi")]) == (Message("system", "Hi"),)
    assert from_text("Hi") == (Message("user", "Hi"),)
    parts = [ContentPart(type="text", text="Look:"), ContentPart(type="image_url")]
    assert from_text(parts) == (PartlyRead("user", "Look:", ("message 0 has an image",)),)


def test_nothing_a_long_text_and_half_a_character_are_unjudged() -> None:
    with pytest.raises(Unjudged, match=f"the limit is {MAX_CHARACTERS}"):
        from_text("x" * (MAX_CHARACTERS + 1))
    with pytest.raises(Unjudged, match="there is no message"):
        from_chat([])
    for nothing in ("", " \n", "\u200b"):
        assert from_text(nothing) == (Message("user", nothing),)  # of which no rule has a verdict
    (named,) = from_chat([ChatMessage(role="user", name="bob", content="")])
    assert named.content == "From bob:"
    assert from_text([ContentPart(type="image_url")])[0].content == ""  # the engine says that
    with pytest.raises(Unjudged, match="message 0: the content is not Unicode text"):
        from_text("\ud800")


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "problems"),
    [
        ({str(key): 1 for key in range(NAMED_PROBLEMS)}, ["extra_forbidden"] * NAMED_PROBLEMS),
        ({str(key): 1 for key in range(100_000)}, ["value_error"]),
        ({"messages": [HI | {"x": "y"}] * 9}, ["value_error"]),  # of many, the first is named
    ],
)
def test_few_problems_are_named_and_many_are_one(body: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        CheckRequest.model_validate({"messages": [HI]} | body)
    assert [problem["type"] for problem in error.value.errors()] == problems


def test_what_failed_is_openai_s_server_error_and_says_why() -> None:
    wanted = {"message": "full", "type": "server_error", "param": None, "code": "overloaded"}
    assert openai_error(503, "full", "overloaded") == {"error": wanted}
