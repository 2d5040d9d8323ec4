"""The reader of JSON that others wrote: what readers differ in is an error that says where."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.strict_json import MAX_BYTES, RepeatedKey, in_words, load_json, read_json


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
        ('{"b": {"a": 1, "a": 2}, "b": 3, "broken', "the key 'a' stands twice at column 16"),
        ('{"a": "' + "1" * 5000 + '", "b": 12345, "c": ' + "1" * 5000, "digits at column 5028"),
        ('{"a": 1,}', "Expecting property name enclosed in double quotes at column 9"),
        ('{"a": "b\x01"}', "Invalid control character at column 9"),
        ('{"a": "b', "Unterminated string starting at column 7"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, where: str) -> None:
    assert where in problem(text)
    if "\n" not in text:
        assert where in problem(text.encode("utf-16"))


def test_repeated_keys_are_told_from_keys_of_several_objects_in_one_pass() -> None:
    text = '{"a": {"a": [{"a": 1}, {"a": 2}]}, "b": "\\"a\\": 1"}'
    assert read_json(text) == read_json(text.encode()) == json.loads(text)
    with pytest.raises(RecursionError) as error:
        read_json("[" * 100_000)
    assert in_words(error.value) == "nested too deeply"
    keys = ", ".join(f'"key {number}": {{"a": "\\\\"}}' for number in range(100_000))
    began = time.thread_time()
    with pytest.raises(RepeatedKey, match="'last' stands twice"):
        read_json(f'{{{keys}, "last": 1, "last": 2}}')
    assert time.thread_time() - began < 4


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *((content, "not valid JSON") for content in (b"", b'{"a": ', b'"\xff"', b"[" * 200_000)),
        (b"1" * 5000, "not valid JSON"),  # more digits than Python reads
        (b"1" + b" " * MAX_BYTES, f"more than {MAX_BYTES} bytes"),
        (None, "cannot be read"),
    ],
)
def test_a_file_is_read_up_to_the_largest_and_what_is_none_is_refused(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text("1" + " " * (MAX_BYTES - 1))
    assert load_json(path, remedy="none") == 1
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GuardError, match=problem) as refused:
        load_json(path, remedy="Write it anew")
    assert str(path) in str(refused.value) and "Write it anew" in str(refused.value)
