"""The client against the real server: answers, retries, deadlines, streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from serve.client import CheckFailed, GuardClient, NotAllowed, RuleUnjudged
from tests.serve.client.censor import ASKED, Censor
from tests.serve.client.dripping import dripping
from tests.serve.serving import MESSAGES, serving

BAD = [*ASKED, {"role": "assistant", "content": "forbidden"}]


@pytest.fixture
def engine() -> Censor:
    return Censor()


@pytest.fixture
def guard(engine: Censor) -> Iterator[GuardClient]:
    with (
        serving(create_app(engine)) as http,
        httpx.Client(trust_env=False) as own,
        GuardClient(str(http.base_url), http_client=own) as guard,
    ):
        yield guard


def answering(responses: list[httpx.Response]) -> tuple[GuardClient, list[httpx.Request]]:
    """A client whose server answers with these, one after the other."""
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return responses.pop(0)

    own = httpx.Client(transport=httpx.MockTransport(handle))
    return GuardClient("http://guard", api_key="a key", http_client=own, deadline_s=3), requests


def ok(verdict: str = "allow") -> httpx.Response:
    body: dict[str, Any] = {"verdict": verdict, "decided_by": [], "results": [], "unjudged": []}
    body |= {"usage": {"cached_tokens": 1, "computed_tokens": 2}, "latency_ms": 3.0}
    return httpx.Response(200, json=body)


def test_a_check_has_a_verdict_for_every_rule(guard: GuardClient) -> None:
    answer = guard.check(MESSAGES, ["words", "fine"])
    assert answer.is_allowed and answer.verdict == "allow"
    assert not answer.results["words"].violates and answer.results["words"].threshold == 0.25
    bad = guard.check(BAD)
    assert bad.verdict == "violation" and bad.decided_by == ("words",)
    assert bad.results["words"].violates and bad.results["words"].p_violation > 0.9


def test_what_could_not_be_judged_is_no_allow(guard: GuardClient) -> None:
    answer = guard.check([{"role": "user", "content": "cannot be judged"}])
    assert answer.verdict == "unjudged" and not answer.is_allowed
    why = RuleUnjudged("too_long", "it does not fit")
    assert answer.unjudged == {"words": why, "fine": why}


def test_the_turn_of_a_violation_is_named_on_request(guard: GuardClient) -> None:
    explained = guard.check(BAD, explain=True).explanations
    assert list(explained) == ["words"] and explained["words"].turn == len(ASKED)
    assert explained["words"].p_after > 0.9 > (explained["words"].p_before or 0)
    assert not guard.check(BAD).explanations


def test_tools_are_judged_with_the_messages(guard: GuardClient) -> None:
    tool = {"type": "function", "function": {"name": "forbidden", "parameters": {}}}
    assert guard.check(ASKED, ["words"]).is_allowed
    assert not guard.check(ASKED, ["words"], tools=[tool]).is_allowed
    with pytest.raises(NotAllowed):
        list(guard.guarded_stream(ASKED, ["Fine."], ["words"], tools=[tool]))


def test_a_mistake_in_the_request_is_raised_with_the_server_s_words(guard: GuardClient) -> None:
    with pytest.raises(CheckFailed, match="not served: nobody") as raised:
        guard.check(MESSAGES, ["nobody"])
    assert raised.value.status == 422


def test_a_stream_is_released_as_far_as_it_is_allowed(guard: GuardClient, engine: Censor) -> None:
    pieces = ["The sea is ", "wide. It ", "is deep", ". And now the forbidden ", "word."]
    released: list[str] = []
    with pytest.raises(NotAllowed) as raised:
        for text in guard.guarded_stream(ASKED, pieces, hold_back=0):
            released.append(text)
    assert released == ["The sea is wide. It "]
    assert raised.value.answer.decided_by == ("words",)
    assert engine.conversations[-1][-1].content == "".join(pieces[:4])


def test_an_allowed_stream_is_released_whole(guard: GuardClient, engine: Censor) -> None:
    pieces: list[str | None] = ["One sentence here.", " Another one", " here.", " End"]
    released = list(guard.guarded_stream(ASKED, pieces, hold_back=6))
    assert released[0] == "One sentence"
    assert "".join(released) == "One sentence here. Another one here. End"
    assert [len(messages) for messages in engine.conversations] == [2, 2, 2]
    pieces = ["The sea ", None, "is wide.", None]  # as OpenAI's last one
    assert "".join(guard.guarded_stream(ASKED, pieces)) == "The sea is wide."


def test_without_room_it_is_tried_again_after_what_the_server_says() -> None:
    busy = httpx.Response(503, headers={"retry-after": "0"})
    guard, requests = answering([busy, busy, ok()])
    assert guard.check(ASKED).is_allowed
    assert len(requests) == 3 and requests[0].headers["authorization"] == "Bearer a key"
    assert 0 < int(requests[0].headers["guard-timeout-ms"]) <= 3000


# What is not asked again, and a word of what is raised.
FINAL = [(httpx.Response(status, text="why"), "why") for status in (400, 401, 422, 429, 500, 502)]
FINAL += [
    (httpx.Response(503, text="the engine failed"), "the engine failed"),
    (httpx.Response(503, headers={"retry-after": ""}, text="it failed"), "it failed"),
    (httpx.Response(503, headers={"retry-after": "60"}, text="too late: why"), "too late"),
    (httpx.Response(200, text="<html>"), "not JSON"),
    (httpx.Response(200, text="[" * 100_000), "not JSON"),
    (httpx.Response(200, json={}), "no check"),
    (httpx.Response(200, json={"verdict": "allow"}), "no check"),
    (httpx.Response(200, json=[]), "no check"),
    (httpx.Response(200, json="allow"), "no check"),
]


@pytest.mark.parametrize(("response", "told"), FINAL)
def test_no_other_answer_is_asked_for_again_and_none_is_an_allow(
    response: httpx.Response, told: str
) -> None:
    guard, requests = answering([response, ok()])
    with pytest.raises(CheckFailed, match=told) as raised:
        guard.check(ASKED)
    assert len(requests) == 1
    assert raised.value.status == (None if told == "no check" else response.status_code)


def test_text_that_is_no_unicode_is_not_sent() -> None:
    guard, requests = answering([ok()])
    with pytest.raises(CheckFailed, match="cannot be sent"):
        list(guard.guarded_stream(ASKED, ["The sea \ud800 is wide."]))
    assert not requests


def test_a_client_of_the_caller_s_own_is_left_open(engine: Censor) -> None:
    with serving(create_app(engine)) as http, httpx.Client(trust_env=False) as own:
        for _ in range(2):
            with GuardClient(str(http.base_url), http_client=own) as guard:
                assert guard.check(ASKED).is_allowed
    with GuardClient("http://guard") as guard:
        pass
    assert guard._http.is_closed


def test_a_server_that_is_gone_or_drips_its_response_in_is_no_allow() -> None:
    for server, why in (
        (contextlib.nullcontext("http://127.0.0.1:9"), "no response"),
        (dripping(), "before the deadline"),
    ):
        with server as address, httpx.Client(trust_env=False) as own:
            guard = GuardClient(address, http_client=own, deadline_s=1)
            with pytest.raises(CheckFailed, match=why):
                guard.check(ASKED)
