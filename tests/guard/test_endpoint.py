"""The client against faults that no server answers with; tests/eval/judge has a real server."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from guard.endpoint import MAX_TIMEOUTS, Completion, Endpoint, endpoint_settings
from guard.errors import GuardError

ANSWER = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}


class Toy:
    """Answers with the replies of `script` in turn, the last one for ever."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self._script = script
        self.requests = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        reply = self._script[min(self.requests, len(self._script) - 1)]
        self.requests += 1
        if isinstance(reply, Exception):
            raise reply
        return reply


def ask(server: Toy) -> Completion:
    endpoint = Endpoint("http://x/v1", "toy", backoff_s=0.001, role="generator")

    async def question() -> Completion:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as client:
            return await endpoint.complete(client, [{"role": "user", "content": "?"}], "case 1")

    return asyncio.run(question())


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ConnectError("lost"),
        httpx.Response(429, headers={"Retry-After": "Mon, 1 Jan 99999999999 1:1:1 GMT"}),
        httpx.Response(200, content=b"[" * 200_000),
        httpx.Response(200, json={"choices": [{"message": {"content": 7}}]}),
    ],
)
def test_a_passing_failure_is_tried_again(fault: httpx.Response | Exception) -> None:
    server = Toy(fault, httpx.Response(200, json=ANSWER))
    completion = ask(server)
    assert (completion.text, completion.finish_reason, completion.refused) == ("yes", "stop", False)
    assert server.requests == 2


def test_a_question_that_is_answered_too_late_is_asked_twice_as_each_may_be_paid_for() -> None:
    server = Toy(httpx.Response(500), httpx.ReadTimeout("late"))
    problem = r"generator's endpoint gave no answer about case 1 in 60 s, 2.*GENERATOR_TIMEOUT_S"
    with pytest.raises(GuardError, match=problem):
        ask(server)
    assert server.requests == MAX_TIMEOUTS + 1


def test_the_key_is_not_shown_and_a_cost_needs_both_prices() -> None:
    endpoint = Endpoint("http://x/v1", "toy", 'sk-"secret', price_in=1.0)
    key = endpoint.api_key
    assert endpoint.client().headers["Authorization"] == f"Bearer {key}"
    shown = endpoint.shown(f"{key}\n{json.dumps(key)} {key!r}")
    assert "secret" not in shown + repr(endpoint) and "\n" not in shown
    assert endpoint.cost_usd(7, 1) is None


SET = {"GENERATOR_BASE_URL": "http://x/v1", "GENERATOR_MODEL": "m", "JUDGE_MODEL": "another role's"}


def test_a_role_reads_its_own_variables() -> None:
    settings = endpoint_settings(SET | {"GENERATOR_API_KEY": "k\n"}, "generator", "to go without")
    assert settings is not None
    endpoint = Endpoint(**settings)
    assert endpoint.url == "http://x/v1/chat/completions"
    assert (endpoint.model, endpoint.api_key, endpoint.role) == ("m", "k", "generator")
    assert endpoint_settings({"JUDGE_MODEL": "m"}, "generator", "to go without") is None
    hidden = r"(?s)^(?!.*secret)GENERATOR_BASE_URL holds a user name.*GENERATOR_API_KEY"
    for scheme in ("https://", "", "ftp://"):
        with pytest.raises(GuardError, match=hidden):
            address = {"GENERATOR_BASE_URL": f"{scheme}me:secret@x"}
            endpoint_settings(SET | address, "generator", "to go without")
