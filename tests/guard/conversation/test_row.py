"""The conversation of a stored row: nothing of what it says is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guard.conversation.chat import PartlyRead
from guard.conversation.example import Message
from guard.conversation.row import conversation_of
from guard.errors import GuardError

HI = [{"role": "user", "content": "Hi"}]


def test_a_row_is_messages_or_an_exchange_or_a_text_and_a_reply_may_be_json() -> None:
    tools = [{"name": "pay"}]
    described, said = conversation_of({"messages": HI, "tools": tools})
    assert (described, said) == (
        Message("system", 'Tools:\n{"name": "pay"}'),
        Message("user", "Hi"),
    )
    exchange = (Message("user", "Q"), Message("assistant", "A"))
    assert conversation_of({"prompt": "Q", "response": "A", "messages": None}) == exchange
    row = {"system": "Be kind.", "prompt": "Q", "response": "A", "text": "A"}
    assert conversation_of(row) == (Message("system", "Be kind."), *exchange)
    assert conversation_of({"text": "T"}) == (Message("user", "T"),)
    assert conversation_of({"text": "T"}, text_role="assistant") == (Message("assistant", "T"),)
    silent = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    assert conversation_of({"messages": [*HI, silent]})[1] == Message("assistant", "")
    for reply in ('{"answer": "yes"}', '{"content": "cut', "[1]"):
        assert conversation_of({"messages": HI, "response": reply})[-1].content == reply


TOOLS = [{"name": "pay"}]
WHOLE = [*HI, {"role": "assistant", "content": "Take 800 mg."}]
EXCHANGE = {"prompt": "Q", "response": "A"}
DOSE = {"role": "user", "content": "Take 800 mg."}
REFUSED: dict[str, list[Any]] = {
    "would be left out": [
        EXCHANGE | {"tools": TOOLS},
        EXCHANGE | {"tools": json.dumps(TOOLS)},
        EXCHANGE | {"text": "Q B A"},
        {"text": "T", "tools": '"Take 800 mg."'},
        {"messages": HI, "prompt": "Take 800 mg."},
        {"messages": HI, "prompt": [*HI, DOSE]},
        {"messages": HI, "prompt": [{"role": "robot"}]},
        {"messages": HI, "prompt": "H", "response": "A"},
        {"messages": HI, "prompt": {"name": "Take 800 mg."}},
        {"messages": HI, "text": "Hi and Q"},
        {"messages": HI, "text": "<|user|> Hi <|end|> Take 800 mg."},
    ],
    "stands twice at column": [
        {"messages": '[{"role": "user", "content": "bad", "content": "Hi"}]'},
        {"messages": HI, "tools": '[{"name": "bad", "name": "pay"}]'},
        {"text": "T", "tools": '[{"name": "bad", "name": "pay"}]'},
        {"messages": HI, "response": '{"content": "bad", "content": "A"}'},
    ],
    "the conversation is empty": [
        {"text": " "},
        {"messages": [{"role": "user", "content": None}]},
        {"prompt": "", "response": "\u200b"},
    ],
    "another reply|response": [
        {"messages": WHOLE, "response": {"error": "none"}},
        {"messages": WHOLE, "response": {"choices": [{"message": {"content": "A"}}] * 2}},
        {"messages": WHOLE, "response": "Another answer."},
        {"messages": WHOLE, "response": "Take 800"},
    ],
    "no conversation": [{}, {"text": None}],
    "must be text": [{"text": 5}],
    "must both be there": [{"prompt": "Q"}, {"text": "T", "response": "A"}],
    "messages must be JSON": [{"messages": "[{"}],
    "tools must be a list": [{"messages": HI, "tools": {"a": 1}}],
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_row_that_cannot_be_read_whole_is_an_error(problem: str) -> None:
    for fields in REFUSED[problem]:
        with pytest.raises(GuardError, match=problem):
            conversation_of(fields)


FOREIGN = ["Messages", "PROMPT", " Text", "tool_calls", "toolCalls", "system_prompt", "System"]
FOREIGN += ["content", "conversations", "output", "context"]


@pytest.mark.parametrize(
    "rest", [{"messages": HI}, {"prompt": "Hi", "response": "A"}, {"text": "Hi"}]
)
def test_a_field_of_another_format_must_say_what_is_said(rest: dict[str, Any]) -> None:
    for name in FOREIGN:
        for value in ("Take 800 mg.", [DOSE], {"text": "A"}):
            with pytest.raises(GuardError, match=f"{name} stands beside"):
                conversation_of(rest | {name: value})
        for value in ("Hi", [*HI], [], {}, "", None, 5):
            assert conversation_of(rest | {name: value}) == conversation_of(rest)
        assert conversation_of(rest | {f"{name}_id": "Row 5"}) == conversation_of(rest)


SAME = [
    {"text": "<|im_start|>user\nHi\nyou<|im_end|>\n<|im_start|>assistant\nA b<|im_end|>\n"},
    {"text": "[INST] Hi you [/INST] A b </s>"},
    {"text": "### Human: Hi you\n\n### Assistant: A b"},
    {"prompt": [{"role": "user", "content": "Hi\nyou"}]},
    {"prompt": {"name": "support", "version": 3}},
    {"prompt": 17},
]


def test_what_public_data_sets_have_beside_messages_is_left_out() -> None:
    """The same conversation by a chat template, or as a list; the template's name."""
    said = [{"role": "user", "content": "Hi\nyou"}, {"role": "assistant", "content": "A b"}]
    for beside in SAME:
        assert len(conversation_of({"messages": said} | beside)) == 2


@pytest.mark.parametrize("beside", [{"text": "Take 800 mg."}, {"delta": {"content": "A"}}])
def test_a_completion_that_says_something_beside_its_message_is_an_error(
    beside: dict[str, Any],
) -> None:
    choice = {"index": 0, "message": {"content": "A"}, "finish_reason": "stop", "text": None}
    completion = {"id": "1", "object": "chat.completion", "usage": {"total_tokens": 5}}
    assert conversation_of({"messages": HI, "response": completion | {"choices": [choice]}})
    for response in ({"choices": [choice | beside]}, {"choices": [choice]} | beside):
        with pytest.raises(GuardError, match="which no rule reads"):
            conversation_of({"messages": HI, "response": response})


def test_what_says_again_what_is_read_or_nothing_and_names_of_tools_are_left_out() -> None:
    assert len(conversation_of({"prompt": "Q", "response": "A", "tools": "search, pay"})) == 2
    named = {"role": "user", "name": "Bob", "content": "Hi\r\nyou"}
    assert len(conversation_of({"messages": [named], "prompt": "Hi\nyou\n"})) == 1
    for beside in ({"prompt": "Hi"}, {"text": "A"}, {"prompt": "", "text": " "}):
        assert len(conversation_of({"messages": HI, "response": "A"} | beside)) == 2
    for nothing in ([], "[]", "", None):
        assert len(conversation_of({"prompt": "Q", "response": "A", "tools": nothing})) == 2
        assert len(conversation_of({"text": "T", "tools": nothing})) == 1


@pytest.mark.parametrize("rest", [{"messages": HI}, {"prompt": "Hi", "response": "A"}])
def test_a_system_prompt_of_its_own_comes_first_and_a_response_last(rest: dict[str, Any]) -> None:
    fields = {"system": "Be kind.", "response": "A"} | rest
    turns = (Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "A"))
    assert conversation_of(fields) == turns
    again = {"messages": [{"role": "system", "content": "Be kind."}, *HI], "system": "Be kind."}
    assert conversation_of(again) == turns[:2]
    with pytest.raises(GuardError, match="system must be text"):
        conversation_of(fields | {"system": ["Be kind."]})


def test_a_response_beside_messages_is_their_last_turn_once_and_whole() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    response = {"content": [{"type": "text", "text": "Sure."}, image]}
    (_, turn) = conversation_of({"messages": HI, "response": response})
    assert turn == PartlyRead("assistant", "Sure.", ("message 0 has an image",))
    whole = [*HI, {"role": "assistant", "content": "Sure."}]
    for seen in (response, {"content": [image]}):
        with pytest.raises(GuardError, match="another reply"):
            conversation_of({"messages": whole, "response": seen})
    logged = [*HI, response | {"role": "assistant"}]
    assert len(conversation_of({"messages": logged, "response": response})) == 2
    # As gateways log a call; without it the reply would be allowed unread.
    turns = (Message("user", "Hi"), Message("assistant", "Take 800 mg."))
    assert conversation_of({"messages": HI, "response": "Take 800 mg."}) == turns
    assert conversation_of({"messages": WHOLE, "response": "Take 800 mg."}) == turns
    completion = {"id": "1", "choices": [{"index": 0, "message": WHOLE[-1]}]}
    for response in (completion, WHOLE[-1], json.dumps(completion), "Take 800 mg.\n"):
        (_, reply) = conversation_of({"messages": HI, "response": response})
        assert reply.content.strip() == "Take 800 mg."
        assert conversation_of({"messages": WHOLE, "response": response}) == turns
    named = [*HI, {"role": "assistant", "name": "bot", "content": "Take 800 mg."}]
    assert len(conversation_of({"messages": named, "response": "Take 800 mg."})) == 2
    for nothing in ("", " ", [], {}):
        assert conversation_of({"messages": HI, "response": nothing}) == turns[:1]
