"""Which keys carry no text that is judged, and which values may stand under them."""

from __future__ import annotations

from typing import Any

import pytest

from guard.conversation.keys import CALL, MESSAGE, is_silent, unread_keys

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
    assert is_silent("extra_content", {"x": SENTENCE}, CALL)
    assert not is_silent("annotations", [], CALL)  # of a call only what its provider keeps
