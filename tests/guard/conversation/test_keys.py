"""Which keys carry no text that is judged, and with which others words may come."""

from __future__ import annotations

from typing import Any

import pytest

from guard.conversation.keys import MESSAGE, first_that_may_say, unknown_keys


@pytest.mark.parametrize("value", ["Hi", {"a": None}, ["Hi"], [{}], [[]], [1, "Hi"], b"Hi"])
def test_a_text_an_object_and_a_list_of_them_may_say_something(value: Any) -> None:
    assert first_that_may_say({"id": "x", "more": value}, MESSAGE) == "more"
    assert first_that_may_say({"reasoning": value, "annotations": value}, MESSAGE) is None


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "", " \n", [], {}, [1, None, False]])
def test_numbers_and_what_is_empty_say_nothing(value: Any) -> None:
    assert first_that_may_say({"more": value}, MESSAGE) is None
    assert list(unknown_keys({"id": "x", "more": value}, MESSAGE)) == [("more", False)]


def test_a_key_that_is_no_name_may_say_something_itself_and_is_not_repeated() -> None:
    for key in ("Take 800 mg.", "", "x" * 41):
        assert first_that_may_say({key: None}, MESSAGE) == "(no name)"
