"""The client against faults, and its variables; tests/eval/judge has a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from guard.endpoint import (
    ATTEMPTS,
    MAX_TIMEOUTS,
    Completion,
    Endpoint,
    endpoint_settings,
    read_completion,
)
from guard.errors import GuardError

ANSWER = {
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 1},
}
TOY = Endpoint("http://x/v1", "toy", backoff_s=0.001)


class Toy:
    """Answers with the replies of `script` in turn, the last one for ever."""

    def __init__(self, *script: httpx.Response | int | Exception) -> None:
        self._script = script
        self.requests = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        reply = self._script[min(self.requests, len(self._script) - 1)]
        self.requests += 1
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply, json=ANSWER) if isinstance(reply, int) else reply


def ask(server: Toy, endpoint: Endpoint = TOY) -> Completion:
    async def question() -> Completion:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as client:
            return await endpoint.complete(client, [{"role": "user", "content": "?"}], "case 1")

    return asyncio.run(question())


def test_an_answer_comes_as_it_is_and_the_key_is_not_shown() -> None:
    endpoint = Endpoint("http://x/v1", "toy", price_in=1.0, price_out=2.0)
    completion = ask(Toy(200), endpoint)
    assert (completion.text, completion.finish_reason, completion.refused) == ("yes", "stop", False)
    assert (completion.prompt_tokens, completion.completion_tokens) == (7, 1)
    assert completion.latency_ms > 0
    assert endpoint.cost_usd(7, 1) == pytest.approx(9e-6)
    assert TOY.cost_usd(7, 1) is None
    server = Toy(403)
    assert ask(server).refused and server.requests == 1
    endpoint = Endpoint("http://x/v1", "toy", 'sk-"secret')
    key = endpoint.api_key
    assert endpoint.client().headers["Authorization"] == f"Bearer {key}"
    shown = endpoint.shown(f"{key}\n{json.dumps(key)} {key!r}")
    assert "secret" not in shown and "\n" not in shown
    assert "secret" not in repr(endpoint)
    completion = read_completion({"choices": [{"message": {"role": "assistant"}}]}, 1.0)
    assert completion.text == ""


@pytest.mark.parametrize(
    "fault",
    [
        500,
        429,
        httpx.ConnectError("lost"),
        httpx.ReadTimeout("late"),
        httpx.Response(429, headers={"Retry-After": "Mon, 1 Jan 99999999999 1:1:1 GMT"}),
        httpx.Response(200, content=b"[" * 200_000),
        httpx.Response(200, json={"choices": [{"message": {"content": 7}}]}),
    ],
)
def test_a_passing_failure_is_tried_again(fault: httpx.Response | int | Exception) -> None:
    server = Toy(fault, 200)
    assert ask(server).text == "yes" and server.requests == 2


def failures() -> Iterator[tuple[Toy, str, int]]:
    yield Toy(503), r"generator's endpoint failed 8 times on case 1.*HTTP 503", ATTEMPTS
    late = r"no answer about case 1 in 60 s, 2 times.*GENERATOR_TIMEOUT_S"
    yield Toy(500, httpx.ReadTimeout("late")), late, MAX_TIMEOUTS + 1
    unasked = r"cannot be asked about case 1.*{}.*GENERATOR_API_KEY"
    yield Toy(401), unasked.format("HTTP 401"), 1
    yield Toy(httpx.Response(429, text="insufficient_quota")), unasked.format("HTTP 429"), 1
    yield Toy(httpx.UnsupportedProtocol("none")), unasked.format("none"), 1


@pytest.mark.parametrize(("server", "problem", "requests"), list(failures()))
def test_a_lasting_failure_ends(server: Toy, problem: str, requests: int) -> None:
    endpoint = Endpoint("http://x/v1", "toy", backoff_s=0.001, role="generator")
    with pytest.raises(GuardError, match=problem):
        ask(server, endpoint)
    assert server.requests == requests


@pytest.mark.parametrize("count", [None, -1, True, "7", 1.5])
def test_a_token_count_that_is_none_is_left_out(count: object) -> None:
    completion = read_completion(ANSWER | {"usage": {"prompt_tokens": count}}, 1.0)
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)


SET = {"GENERATOR_BASE_URL": "http://x/v1", "GENERATOR_MODEL": "m", "JUDGE_MODEL": "another role's"}


def test_a_role_reads_its_own_variables() -> None:
    settings = endpoint_settings(SET | {"GENERATOR_API_KEY": "k\n"}, "generator", "to go without")
    assert settings is not None
    endpoint = Endpoint(**settings)
    assert (endpoint.url, endpoint.model, endpoint.api_key, endpoint.role) == (
        "http://x/v1/chat/completions",
        "m",
        "k",
        "generator",
    )
    assert endpoint_settings({"JUDGE_MODEL": "m"}, "generator", "to go without") is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"GENERATOR_MODEL": ""}, r"GENERATOR_MODEL is not set.*or neither to go without"),
        ({"GENERATOR_TIMEOUT_S": "-1"}, r"GENERATOR_TIMEOUT_S has a bad value.*Seconds"),
        *(
            (
                {"GENERATOR_BASE_URL": url},
                r"(?s)^(?!.*secret)GENERATOR_BASE_URL holds a user name.*GENERATOR_API_KEY",
            )
            for url in ("https://me:secret@x/v1", "me:secret@x/v1", "ftp://me:secret@x")
        ),
        ({"GENERATOR_API_KEY": "a\nb"}, r"GENERATOR_API_KEY holds a character"),
    ],
)
def test_errors_name_the_role_s_variable(changed: dict[str, str], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        endpoint_settings(SET | changed, "generator", "to go without")
