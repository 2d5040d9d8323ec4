"""OpenAI's messages as a conversation: every word of them, or none and no verdict."""

from __future__ import annotations

from typing import Any

import pytest

from guard.example import Message
from serve.api.errors import Unjudged
from serve.api.formats.conversation import ChatMessage, from_chat, from_text
from serve.api.limits import MAX_CHARACTERS


def words(**message: Any) -> str:
    """What the one message says."""
    (judged,) = from_chat([ChatMessage.model_validate({"role": "assistant"} | message)])
    return judged.content


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("developer", "system"),
        ("system", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_every_role_of_openai_s_is_one_of_ours(theirs: str, ours: str) -> None:
    message = ChatMessage.model_validate({"role": theirs, "content": "Hi", "name": "bo"})
    assert from_chat([message]) == (Message(ours, "Hi"),)


def test_parts_and_refusals_are_lines_of_one_message() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "refusal", "refusal": "No."}]
    assert words(content=parts) == "One.\nNo."
    assert words(content=None, refusal="I must not.") == "I must not."
    assert words(content=None) == ""


def test_a_tool_call_is_judged_with_its_name_and_what_its_arguments_say() -> None:
    call = {
        "id": "call_7",
        "type": "function",
        "function": {"name": "pay", "arguments": '{"to": "caf\\u00e9 \\"B\\""}'},
    }
    judged = words(content="Paying.", tool_calls=[call])
    assert judged == 'Paying.\n{"name": "pay", "arguments": {"to": "café \\"B\\""}}'
    assert words(function_call=call["function"]) == judged.partition("\n")[2]


@pytest.mark.parametrize("arguments", ["{broken", "[" * 100_000], ids=["no JSON", "too deep"])
def test_arguments_that_cannot_be_read_are_judged_as_they_stand(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "pay", "arguments": arguments}}
    assert arguments in words(tool_calls=[call])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ],
)
def test_what_is_no_text_is_unjudged_and_not_left_out(part: dict[str, Any]) -> None:
    with pytest.raises(Unjudged, match=f"'{part['type']}' is no text"):
        words(content=[{"type": "text", "text": "Look:"}, part])


def test_audio_nothing_a_long_text_and_half_a_character_are_unjudged() -> None:
    with pytest.raises(Unjudged, match="audio"):
        words(audio={"id": "audio_1"})
    with pytest.raises(Unjudged, match=f"more than {MAX_CHARACTERS} characters"):
        from_text("x" * (MAX_CHARACTERS + 1))
    with pytest.raises(Unjudged, match="there is no message"):
        from_chat([])
    with pytest.raises(Unjudged, match="message 0: the content is not Unicode text"):
        from_text("\ud800")
