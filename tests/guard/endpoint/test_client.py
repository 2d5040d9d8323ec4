"""The client against endpoints with faults; tests/eval/judge has a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from guard.endpoint.client import ATTEMPTS, MAX_TIMEOUTS, Completion, Endpoint, read_completion
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


def test_an_answer_comes_as_it_is_with_what_it_cost() -> None:
    endpoint = Endpoint("http://x/v1", "toy", price_in=1.0, price_out=2.0)
    completion = ask(Toy(200), endpoint)
    assert (completion.text, completion.finish_reason, completion.refused) == ("yes", "stop", False)
    assert (completion.prompt_tokens, completion.completion_tokens) == (7, 1)
    assert completion.latency_ms > 0
    assert endpoint.cost_usd(7, 1) == pytest.approx(9e-6)
    assert TOY.cost_usd(7, 1) is None


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


def test_a_text_that_is_not_taken_is_refused() -> None:
    server = Toy(403)
    assert ask(server).refused and server.requests == 1


@pytest.mark.parametrize("count", [None, -1, True, "7", 1.5])
def test_a_token_count_that_is_none_is_left_out(count: object) -> None:
    completion = read_completion(ANSWER | {"usage": {"prompt_tokens": count}}, 1.0)
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)


def test_the_key_is_sent_and_not_shown_in_any_notation() -> None:
    endpoint = Endpoint("http://x/v1", "toy", 'sk-"secret')
    key = endpoint.api_key
    assert endpoint.client().headers["Authorization"] == f"Bearer {key}"
    shown = endpoint.shown(f"{key}\n{json.dumps(key)} {key!r}")
    assert "secret" not in shown and "\n" not in shown
    assert "secret" not in repr(endpoint)


def test_a_message_without_content_is_an_empty_answer() -> None:
    completion = read_completion({"choices": [{"message": {"role": "assistant"}}]}, 1.0)
    assert completion.text == ""
