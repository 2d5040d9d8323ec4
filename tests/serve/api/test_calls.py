"""Conversations that are kept until their reply comes, and never another call's."""

from __future__ import annotations

import pytest

from guard.conversation.chat import PartlyRead
from guard.conversation.example import Message
from serve.api.calls import OVERHEAD_CHARACTERS, CallsUnderWay
from serve.api.errors import Unjudged

HELLO = (Message("user", "Hello"),)
OTHER = (Message("user", "Good morning"),)


def test_a_conversation_is_there_for_every_reply_to_it_with_its_salt_and_no_other() -> None:
    calls = CallsUnderWay()
    calls.keep("1", HELLO, "tenant 7")
    calls.keep("2", OTHER)
    for _ in range(2):  # a reply that streams is checked several times
        assert (calls.find("1").messages, calls.find("1").cache_salt) == (HELLO, "tenant 7")
    assert calls.find("2").messages == OTHER
    for unknown in ("3", "", None):
        with pytest.raises(Unjudged, match="conversation is not known here"):
            calls.find(unknown)


def test_an_id_of_two_conversations_is_unjudged_and_of_one_twice_is_not() -> None:
    calls = CallsUnderWay()
    calls.keep("1", HELLO)
    calls.keep("1", HELLO)
    assert calls.find("1").messages == HELLO
    calls.keep("1", OTHER)
    calls.keep("1", OTHER)
    with pytest.raises(Unjudged, match="two conversations"):
        calls.find("1")


def test_old_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsUnderWay()
    monkeypatch.setattr("serve.api.calls.CALL_S", 0.0)
    calls.keep("1", HELLO)
    with pytest.raises(Unjudged):
        calls.find("1")
    assert (calls._calls, calls._characters) == ({}, 0)


def test_the_oldest_make_room_when_there_are_too_many() -> None:
    calls = CallsUnderWay(3 * (5 + 2 * OVERHEAD_CHARACTERS))
    for call_id in "1234":  # each has one message of five characters
        calls.keep(call_id, HELLO)
    with pytest.raises(Unjudged):
        calls.find("1")
    assert calls.find("2").messages == calls.find("4").messages == HELLO


def test_messages_without_a_text_and_what_cannot_be_read_take_room_too() -> None:
    calls = CallsUnderWay(max_characters=10_000)
    for number in range(10):
        calls.keep(str(number), (Message("user", ""),) * 20)
    assert len(calls._calls) == 2
    unread = tuple(f"message 0 has a part of type {number}" for number in range(1000))
    calls.keep("unread", (PartlyRead("user", "", unread),))
    assert calls._calls == {}
