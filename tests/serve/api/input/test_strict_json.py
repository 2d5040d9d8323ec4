"""A key that stands twice in a body is refused, in every format that has a JSON body."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from serve.api.app import create_app
from serve.api.input.limits import MAX_MESSAGES
from serve.api.input.strict_json import MAX_VALUES, read_body
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

HEADERS = {"content-type": "application/json"}
CHAT = '"messages": [{"role": "user", "content": "Hi"}]'
BODIES = {
    "/v1/check": f"{{{CHAT}, {CHAT}}}",
    "/v1/check/turns": f"{{{CHAT}, {CHAT}}}",
    "/v1/chat/completions": f'{{"model": "fine", {CHAT}, {CHAT}}}',
    "/v1/moderations": '{"model": "fine", "input": "bad", "input": "Hi"}',
    "/fine/api/v1/text/contents": '{"contents": ["bad"], "contents": ["Hi"]}',
    "/beta/litellm_basic_guardrail_api": '{"input_type": "request", "texts": [], "texts": ["Hi"]}',
    "/request": f'{{"body": {{{CHAT}, {CHAT}}}}}',
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(ToyEngine({"fine": -2.0}))) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_a_body_with_a_key_twice_is_refused(client: httpx.Client, path: str) -> None:
    response = client.post(path, content=BODIES[path], headers=HEADERS)
    assert response.status_code in (400, 422), response.text
    key = response.text.partition("the key '")[2].partition("'")[0]
    column = BODIES[path].rindex(f'"{key}"') + 1
    where = f"character {column - 1} (line 1, column {column})"
    assert f"the key '{key}' stands twice at {where}" in response.text
    whole = json.dumps(json.loads(BODIES[path]))
    assert client.post(path, content=whole, headers=HEADERS).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_what_no_reader_can_read_is_the_caller_s_mistake_and_said(
    client: httpx.Client, path: str
) -> None:
    deep = client.post(path, content=b'{"a": ' + b"[" * 100_000, headers=HEADERS)
    assert deep.status_code == 422 and "the body is nested too deeply" in deep.text
    not_unicode = client.post(path, content=b'{"a": "\xff"}', headers=HEADERS)
    assert not_unicode.status_code == 400 and "the body is not Unicode" in not_unicode.text
    long_number = client.post(path, content=b"1" * 5000, headers=HEADERS)
    assert long_number.status_code in (400, 422)
    assert "a number has too many digits" in long_number.text


def test_a_key_twice_deep_in_a_body_or_in_a_line_of_a_stream_is_refused(
    client: httpx.Client,
) -> None:
    message = '{"role": "user", "content": "bad", "content": "Hi"}'
    body = f'{{"messages": [{message}]}}'
    assert client.post("/v1/check", content=body, headers=HEADERS).status_code == 422
    line = f'{{"messages": [{message}]}}\n'
    response = client.post("/v1/check/stream", content=line)
    assert response.status_code == 422 and "'content' stands twice" in response.text
    with pytest.raises(ValueError, match="'content' stands twice"):
        read_body(body.encode())


def test_a_name_that_is_no_unicode_is_the_caller_s_mistake(client: httpx.Client) -> None:
    body = f'{{{CHAT}, "rules": ["\\ud800"]}}'
    response = client.post("/v1/check", content=body, headers=HEADERS)
    assert response.status_code == 422 and "\\ud800" in response.json()["error"]


def test_a_key_twice_among_many_is_found_in_one_pass() -> None:
    keys = ", ".join(f'"key {number}": 0' for number in range(50_000))
    began = time.thread_time()
    with pytest.raises(ValueError, match="'last' stands twice"):
        read_body(f'{{{keys}, "last": 1, "last": 2}}'.encode())
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("element", ["{}", "1", "[]", '""'])
def test_a_body_of_very_many_values_is_refused(client: httpx.Client, element: str) -> None:
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


def test_of_many_wrong_parts_the_first_is_named(client: httpx.Client) -> None:
    for field in ("content", "tool_calls"):
        body = {"messages": [{"role": "user", field: [1] * 900}]}
        response = client.post("/v1/check", json=body)
        assert response.status_code == 422
        assert f"{field}" in response.text and "more" not in response.json()["error"]


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
