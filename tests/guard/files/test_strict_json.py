"""The reader of JSON that others wrote: what readers differ in is an error that says where."""

from __future__ import annotations

import json
import time

import pytest

from guard.files.strict_json import RepeatedKey, in_words, read_json


def problem(text: str | bytes) -> str:
    with pytest.raises(json.JSONDecodeError) as error:
        read_json(text)
    return in_words(error.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' stands twice at column 10"),
        ('{"a": 1, "\\u0061": 2}', "the key 'a' stands twice at column 10"),
        ('{\n "a": 1,\n "a" : 2\n}', "the key 'a' stands twice at line 3, column 2"),
        ('[{"a": "}{\\"a", "b": [{"a": 1}], "b": 2}]', "the key 'b' stands twice at column 34"),
        ('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}', "the key 'c' stands twice at column 24"),
        ('{"b": {"a": 1, "a": 2}, "b": 3, "broken', "the key 'a' stands twice at column 16"),
        ('{"": 1, "": 2}', "the key '' stands twice at column 9"),
        ('{"a": "' + "1" * 5000 + '", "b": ' + "1" * 5000 + "}", "too many digits at column 5016"),
        ('{"a": 1,}', "Expecting property name enclosed in double quotes at column 9"),
        ('{"a": "b\x01"}', "Invalid control character at column 9"),
        ('{"a": "b', "Unterminated string starting at column 7"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, where: str) -> None:
    assert where in problem(text)
    if "\n" not in text:
        assert where in problem(text.encode("utf-16"))


def test_the_same_key_in_several_objects_is_read() -> None:
    text = '{"a": {"a": [{"a": 1}, {"a": 2}]}, "b": "\\"a\\": 1"}'
    assert read_json(text) == read_json(text.encode()) == json.loads(text)


def test_a_key_twice_among_many_is_found_in_one_pass() -> None:
    keys = ", ".join(f'"key {number}": {{"a": "\\\\"}}' for number in range(100_000))
    began = time.thread_time()
    with pytest.raises(RepeatedKey, match="'last' stands twice"):
        read_json(f'{{{keys}, "last": 1, "last": 2}}')
    assert time.thread_time() - began < 4


def test_nesting_without_end_is_said_in_words() -> None:
    with pytest.raises(RecursionError) as error:
        read_json("[" * 100_000)
    assert in_words(error.value) == "nested too deeply"
