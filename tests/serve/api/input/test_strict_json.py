"""What no reader can read, or would read for long, is refused; `test_wire_format.py` asks all
formats.
"""

from __future__ import annotations

import json
import time

import pytest
from httpx import Client

from serve.api.input.limits import MAX_MESSAGES
from serve.api.input.strict_json import MAX_VALUES, read_body

HEADERS = {"content-type": "application/json"}


def test_a_key_twice_is_refused_and_its_place_said(client: Client) -> None:
    chat = '"messages": [{"role": "user", "content": "Hi"}]'
    body = f"{{{chat}, {chat}}}"
    column = body.rindex('"messages"') + 1
    where = f"character {column - 1} (line 1, column {column})"
    response = client.post("/v1/check", content=body, headers=HEADERS)
    assert response.status_code == 422
    assert f"the key 'messages' stands twice at {where}" in response.text
    with pytest.raises(ValueError, match="'content' stands twice"):
        read_body(b'{"messages": [{"role": "user", "content": "bad", "content": "Hi"}]}')


def test_a_key_twice_among_many_is_found_in_one_pass() -> None:
    keys = ", ".join(f'"key {number}": 0' for number in range(50_000))
    began = time.thread_time()
    with pytest.raises(ValueError, match="'last' stands twice"):
        read_body(f'{{{keys}, "last": 1, "last": 2}}'.encode())
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("element", ["{}", "1", "[]", '""'])
def test_a_body_of_very_many_values_is_refused(client: Client, element: str) -> None:
    """Each takes a kilobyte of memory to validate, and the time of everybody else."""
    many = ",".join([element] * (MAX_VALUES + 1))
    for field in (f'"tool_calls": [{many}]', f'"content": [{many}]', f'"extra": [{many}]'):
        body = f'{{"messages": [{{"role": "user", {field}}}]}}'
        response = client.post("/v1/check", content=body, headers=HEADERS)
        assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
        assert "the body has more than 300,000 values" in response.text
    line = client.post("/v1/check/stream", content=f'{{"messages": [{many}]}}\n')
    assert line.status_code == 413 and "more than 300,000 values" in line.text


def test_as_many_values_as_may_be_are_read_and_a_scalar_is_none() -> None:
    assert len(read_body(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")) == MAX_VALUES
    assert read_body(b'"text"') == "text" and read_body(b"5") == 5


def test_the_longest_conversation_with_every_field_has_few_enough_values() -> None:
    """As OpenAI's SDK writes a message and LiteLLM sends it, its text beside it."""
    call = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    message |= {"audio": None, "function_call": None, "name": None, "annotations": []}
    chat = {"structured_messages": [message] * MAX_MESSAGES, "texts": ["Hi"] * MAX_MESSAGES}
    assert read_body(json.dumps(chat).encode()) == chat


@pytest.mark.parametrize("content", ["[],", "{},", ",", '"\\"\\"' + "," * 9 + '\\"'])
def test_very_many_values_or_signs_of_them_take_no_time(content: str) -> None:
    body = ("[" + content * (4_000_000 // len(content))).encode()
    began = time.thread_time()
    with pytest.raises(ValueError):
        read_body(body)
    assert time.thread_time() - began < 2


def test_commas_and_brackets_of_texts_are_no_values() -> None:
    text = '[,{"\\' * MAX_VALUES
    assert read_body(json.dumps({"content": text}).encode()) == {"content": text}
