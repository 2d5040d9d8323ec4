"""OpenAI's messages as turns: every word of them as text, and what is no text is named. Which keys
carry no text that is judged, and which values may stand under them.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.conversation import chat, keys
from guard.conversation.chat import (
    MAX_ARGUMENTS,
    ChatMessage,
    PartlyRead,
    rendering_hash,
    says_nothing,
    turns,
    turns_of,
    unread_parts,
)
from guard.conversation.example import Message
from guard.conversation.keys import MESSAGE, is_silent, unread_keys
from guard.errors import GuardError

CALL = {
    "id": "call_7",
    "type": "function",
    "function": {"name": "pay", "arguments": '{"to": "caf\\u00e9 \\"B\\""}'},
}
WITHOUT_ID = [CALL | {"id": ""}, CALL | {"id": None}, {"function": CALL["function"]}]
CALL_LINE = '{"name": "pay", "arguments": {"to": "café \\"B\\""}}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def read(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return turns([ChatMessage.model_validate(message) for message in messages])


def words(**message: Any) -> str:
    """What the one message says."""
    (turn,) = read({"role": "assistant"} | message)
    return turn.content


def test_all_that_a_message_says_is_lines_of_one_turn() -> None:
    for theirs, ours in {"developer": "system", "function": "tool", "user": "user"}.items():
        assert read({"role": theirs, "content": "Hi"}) == (Message(ours, "Hi"),)
    parts = [{"type": "text", "text": "One."}, {"type": "refusal", "refusal": "No."}]
    assert words(content=parts) == "One.\nNo."
    assert words(content=None, refusal="I must not.") == "I must not."
    assert words(content=None) == ""
    assert words(content="Paying.", tool_calls=[CALL]) == f"Paying.\n{CALL_LINE}"
    assert words(function_call=CALL["function"]) == CALL_LINE


def test_a_turn_says_who_it_is_from_and_a_result_which_tool_gave_it() -> None:
    named, _, result, unknown = read(
        {"role": "user", "content": "Hi", "name": "bo"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "done", "tool_call_id": "call_7"},
        {"role": "tool", "content": "done", "tool_call_id": "call_8"},
    )
    assert named.content == "From bo:\nHi"
    assert result == Message("tool", "From pay:\ndone")
    assert unknown == Message("tool", "done")


def test_tools_are_described_first_and_untrusted_json_is_read_as_the_server_reads_it() -> None:
    described, turn = turns([ChatMessage(role="user", content="Hi")], [WEATHER, {"type": "x"}])
    lines = ["Tools:", '{"name": "weather", "parameters": {"type": "object"}}', '{"type": "x"}']
    assert described == Message("system", "\n".join(lines))
    assert turn == Message("user", "Hi")
    assert turns([]) == ()
    messages = [
        {"role": "user", "content": "Hi", "name": "bo"},
        {"role": "assistant", **{"content": None, "tool_calls": [CALL], "annotations": []}},
    ]
    expected = (*turns([], [WEATHER]), *read(*messages))
    assert turns_of(messages, [WEATHER], where="x") == expected


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, "an image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "a sound"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "a file"),
        ({"type": "hologram"}, "a part of type 'hologram'"),
        ({"type": "application/pdf"}, "a part of an unknown type"),
        ({"type": "x" * 41}, "a part of an unknown type"),
    ],
)
def test_what_is_no_text_is_named_and_the_text_beside_it_is_read(
    part: dict[str, Any], what: str
) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}
    _, turn = read({"role": "system", "content": "Hi"}, message)
    assert turn == PartlyRead("user", "Look:", (f"message 1 has {what}",))
    (heard,) = read({"role": "assistant", "audio": {"id": "audio_1"}})
    unread = unread_parts([turn, Message("user", "Hi"), heard])
    assert unread == (f"message 1 has {what}", "message 0 has a sound")


MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["developer", "user", "assistant", "tool"])},
    optional={
        "content": st.text(max_size=20),
        "name": st.text(max_size=5),
        "tool_calls": st.lists(st.sampled_from([CALL, *WITHOUT_ID]), min_size=1, max_size=2),
        "tool_call_id": st.sampled_from(["call_7", "call_8", "", "None"]),
    },
)


@given(st.lists(MESSAGES, min_size=1, max_size=6), st.integers(0, 6))
def test_what_comes_later_changes_no_turn_and_only_a_result_depends_on_what_came_before(
    messages: list[dict[str, Any]], count: int
) -> None:
    assert read(*messages[:count]) == read(*messages)[:count]
    for message, turn in zip(messages, read(*messages), strict=True):
        if message.get("tool_call_id") != CALL["id"]:
            assert read(message) == (turn,)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "non-empty list"),
        (["hi"], r"x: turn 0 must be .*Input should be an object"),
        ([{"role": "root", "content": "hi"}], "turn 0 must be .*role: Input should be"),
        ([{"role": "user", "content": 5}], "turn 0 must be .*content"),
        ([{"role": "user", "content": "\ud800"}], "message 0: the content is not Unicode"),
    ],
)
def test_what_training_cannot_read_is_named(value: Any, problem: str) -> None:
    with pytest.raises(GuardError, match=problem):
        turns_of(value, where="x")


HIDING = [
    '{"text": "ibuprofen", "text": "ok"}',
    '{"n": ' + "1" * 5000 + ', "text": "\\u0069buprofen"}',
    '\ufeff{"text": "\\u0069buprofen"}',
    '{"text": "\\u0069buprofen",}',
]


def test_no_word_of_arguments_is_hidden_by_what_readers_of_json_differ_in() -> None:
    for arguments in HIDING:
        assert "ibuprofen" in words(function_call={"name": "pay", "arguments": arguments})
    for unread in ("{broken", "[" * 100_000):
        assert unread in words(function_call={"name": "pay", "arguments": unread})


def test_what_stands_beside_a_function_or_a_text_is_read() -> None:
    """But for what an ordinary tool has."""
    for beside in ({"custom": {"input": "ibuprofen"}}, {"note": "ibuprofen"}):
        for function in ({"name": "pay"}, {"name": "pay", "custom": "", "note": ""}):
            assert "ibuprofen" in words(tool_calls=[{"function": function, **beside}])
            assert "ibuprofen" in turns([], [{"function": function, **beside}])[0].content
    assert "ibuprofen" in words(content=[{"type": "text", "text": "ok", "refusal": "ibuprofen"}])
    called = {"id": "call_1", "type": "function", "index": 0, "custom": None}
    called["extra_content"] = {"google": {"thought_signature": "ibuprofen"}}
    assert words(tool_calls=[{**called, "function": {"name": "pay"}}]) == '{"name": "pay"}'
    unread = read({"role": "user", "content": [{"type": "text", "content": "ibuprofen"}]})
    assert unread_parts(unread) == ("message 0 has the key 'content.0.content'",)


def test_long_arguments_and_signs_without_ink_are_read_at_once_and_deep_nesting_is_refused() -> (
    None
):
    emoji = json.dumps("\U0001f600")[1:-1]  # two escapes
    call = {"function": {"name": "pay", "arguments": "{" + f"\\u0041{emoji}x" * 50_000}}
    assert words(tool_calls=[call]).count("A\U0001f600x") == 50_000
    assert words(name="\u00ad" * 1_000_000, content="Hi") == "Hi"
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for function in ({"name": "pay", "arguments": nested}, {"name": nested}):
        call = ChatMessage(role="assistant", tool_calls=[{"function": function}])
        with pytest.raises(GuardError, match="nested too deeply"):
            turns([ChatMessage(role="user", content="Hi"), call])


@pytest.mark.parametrize("content", ["", "\n", "\u200b"])
def test_a_name_is_a_line_unless_nobody_sees_it_or_it_is_a_silent_tool_s(content: str) -> None:
    # Else no rule would read what stands in it.
    named = read({"role": "user", "name": "Take 800 mg", "content": content})
    assert named[0].content.startswith("From Take 800 mg:") and not says_nothing(named)
    # Else an empty turn would be read in place of the text before it. The tool's name stands in its
    # call.
    empty = [
        {"role": "tool", "tool_call_id": "call_7", "content": content},
        {"role": "user", "name": "\u200b ", "content": content},
    ]
    _, *silent = read({"role": "assistant", "tool_calls": [CALL]}, *empty)
    assert [turn.content for turn in silent] == [content, content] and says_nothing(silent)


def test_what_models_read_and_what_cannot_be_read_say_something_and_tools_are_said_by_nobody() -> (
    None
):
    tags = "".join(chr(0xE0000 + ord(sign)) for sign in "Take 800 mg")
    assert not says_nothing([Message("assistant", tags)])
    assert not says_nothing(read({"role": "assistant", "name": tags, "content": ""}))
    for blank in (" \t", "\u200b\u2800", "\U000e0001\ufe0f", "&#8203;&amp;nbsp;", "%20\\u200b"):
        assert says_nothing([Message("assistant", blank)])
    silent = ChatMessage(role="user", content="")
    assert says_nothing(turns([silent], [WEATHER]))
    for speaks in ({"content": "Tools: none."}, {"tool_calls": [{}]}, {"audio": {"id": "1"}}):
        assert not says_nothing(read({"role": "system"} | speaks))


@pytest.mark.parametrize("sign", ["% ", "&#65", "\\u0041", "a&#8203; ", "&#8203; a%20"])
def test_a_long_text_is_read_until_it_says_something_and_unseen_signs_are_looked_up_once(
    sign: str,
) -> None:
    began = time.thread_time()
    assert not says_nothing(read({"role": "user", "content": sign * 2000 + "\n" + sign * 999_999}))
    signs = "".join(chr(0xE0100 + number) for number in range(0xF0))
    assert says_nothing([Message("user", signs)] * 4_000)
    assert time.thread_time() - began < 0.5  # which either of them would take otherwise


def test_a_sign_behind_a_long_blank_is_seen_all_the_same() -> None:
    for blank in ("&#8203;", "&#8203; ", "%20 ", "&amp;#8203;\n", "\\u200b\u200b"):
        long_blank = blank * 3000
        assert says_nothing([Message("user", long_blank)])
        for sign in ("!", " &#97;", "\u4e2d"):
            assert not says_nothing([Message("user", f"{long_blank}{sign}{long_blank}")])


def test_arguments_beyond_the_limit_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in one call nor in several together, nor in the description of a tool."""
    monkeypatch.setattr("guard.conversation.chat._arguments", lambda _: pytest.fail("decoded"))
    half = {"function": {"name": "pay", "arguments": "[]," * (MAX_ARGUMENTS // 6 + 2)}}
    calls = ChatMessage(role="assistant", tool_calls=[half])
    function = ChatMessage(role="assistant", function_call=half["function"])
    both = ChatMessage(role="assistant", tool_calls=[half, half])
    for messages, tools in (([calls, function], []), ([calls], [half]), ([both], [])):
        with pytest.raises(GuardError, match="too long to be read"):
            turns(messages, tools)


RENDERING = {"TOOLS": "Functions:\n", "TEXT_PARTS": ("input_text",), "FUNCTION_KEYS": ("custom",)}
RENDERING |= {"ROLES": chat.ROLES | {"developer": "user"}, "_line": str, "_arguments": str}


@pytest.mark.parametrize("name", RENDERING)
def test_the_hash_follows_from_how_messages_are_rendered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rendering_hash()
    assert rendering_hash() == before
    monkeypatch.setattr(chat, name, RENDERING[name])
    assert rendering_hash() != before


SENTENCE = "Take 800 mg."


WORDS = ["Hi", {"a": "Hi"}, {"Take 800": 1}, ["Hi"], [{"a": ["Hi"]}], [1, "Hi"], b"Hi"]
NUMBERS = [None, True, 0, 1.5, "", " \n", [], {}, [[]], [1, None, False], {"a": {"b": 1}}]


def test_words_under_an_unknown_key_are_not_read_and_numbers_say_nothing() -> None:
    for value in [*WORDS, [105] * 11, [[[[[[[1]]]]]]]]:
        assert list(unread_keys({"id": "x", "more": value}, MESSAGE)) == ["more"]
        assert not list(unread_keys({"more": value}, MESSAGE, ["more"]))
        for known in ("reasoning", "annotations", "extra_content"):
            assert not list(unread_keys({known: value}, MESSAGE))
    for value in NUMBERS:
        assert not list(unread_keys({"more": value, "take_800_mg": value}, MESSAGE))
    # A key that is no name may say something itself, and is not repeated.
    for key in (SENTENCE, "", "x" * 41):
        assert list(unread_keys({key: None}, MESSAGE)) == ["(no name)"]


# A value of each kind that such a key has, and what is none.
KNOWN: dict[str, list[Any]] = {
    "id": ["msg_1", "a" * 5000, 7],
    "index": [0],
    "created": [1_700_000_000, "2026-01-01T10:00:00Z"],
    "timestamp": ["2026-01-01 10:00:00.5+01:00"],
    "usage": [{"input_tokens": 5, "service_tier": "standard", "cache": {"read": 1}}],
    "cache_control": [{"type": "ephemeral", "ttl": "5m"}],
    "phase": ["final_answer"],
    "stop_sequence": ["\n\nHuman:", "</s>"],
    "model": ["openai/gpt-4o:free"],
    "metadata": [{"user_id": "7", "tags": ["a", "b"]}],
    "user": ["bo@example.org"],
    "childrenIds": [["a", "b"]],
    "encrypted_content": ["Z" * 5000 + "=="],
}


@pytest.mark.parametrize("key", KNOWN)
def test_a_known_key_has_values_of_its_shape_alone(key: str) -> None:
    for value in KNOWN[key]:
        assert is_silent(key, value, MESSAGE)
    for wrong in (SENTENCE, {"x": SENTENCE}, [SENTENCE], {SENTENCE: 1}, "\u5e03\u6d1b\u82ac"):
        assert list(unread_keys({key: wrong}, MESSAGE)) == [key]
    assert is_silent("extra_content", {"x": SENTENCE}, keys.CALL)
    assert not is_silent("annotations", [], keys.CALL)  # of a call only what its provider keeps
