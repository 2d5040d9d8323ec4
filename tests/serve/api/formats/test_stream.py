"""A reply is judged while it is written: what is released when, and what it costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.formats.stream import GrowingReply, StreamPiece, StreamRequest
from serve.engine.refusals import Overloaded
from serve.engine.thread.engine_thread import EngineThread
from serve.policy.ruling import Ruling
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.client.censor import ASKED, Censor
from tests.serve.guarded import guard_engine
from tests.serve.serving import serving
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

OPENING = {"messages": ASKED, "every_tokens": 3, "hold_back": 0}
SEA = {"append": "The sea is"}


def exchanged(client: Client, *steps: Sequence[object], **opening: Any) -> list[dict[str, Any]]:
    """The events of a stream: one is read after the lines of each step, and all after the last."""

    async def use(stream: OpenStream) -> list[dict[str, Any]]:
        events = []
        for number, lines in enumerate(steps, start=1):
            for line in lines:
                stream.write(line)
            if number < len(steps):
                events.append(await stream.read())
        stream.write(None)
        return [*events, *await stream.rest()]

    events: list[dict[str, Any]] = streamed(client, OPENING | opening, use)
    return events


def said(engine: Censor) -> list[str]:
    return [messages[-1].content for messages in engine.conversations]


def test_text_is_released_while_the_body_is_still_sent(censored: Client, censor: Censor) -> None:
    wide = [{"append": " wide"}, {"append": " and deep here"}]
    end = [{"append": " now", "end": True}]
    first, second, last = exchanged(censored, [SEA], wide, end)
    assert first["release"] == "The sea is" and first["verdict"] == "allow"
    assert first["p_violation"]["words"] < 0.1 and first["checked_characters"] == 10
    assert (second["release"], last["release"]) == (" wide and deep here", " now")
    judgement = last["judgement"]
    assert judgement["verdict"] == "allow" and len(judgement["results"]) == 2
    assert judgement.keys() >= {"decided_by", "usage", "latency_ms", "unjudged"}
    checked = said(censor)
    assert (checked[0], checked[-1]) == ("The sea is", "The sea is wide and deep here now")


def test_nothing_is_released_after_a_violation(censored: Client, censor: Censor) -> None:
    first, last = exchanged(censored, [SEA], [{"append": " so very forbidden"}])
    assert (first["release"], last["release"]) == ("The sea is", "")
    assert last["judgement"]["verdict"] == "violation"
    assert last["judgement"]["decided_by"] == ["words"]
    assert len(censor.conversations) == 2


def test_a_check_is_due_at_a_sentence_s_end(censored: Client, censor: Censor) -> None:
    events = exchanged(censored, [{"append": "Yes."}], [{"end": True}], hold_back=2)
    # The last ones wait for the next check; at the end nothing was new.
    assert [event["release"] for event in events] == ["Ye", "s."] and said(censor) == ["Yes."]
    censor.conversations.clear()
    lines = [{"append": "Yes."}, {"append": " No", "end": True}]
    (event,) = exchanged(censored, lines, at_sentence_ends=False)
    assert said(censor) == [event["release"]] == ["Yes. No"]


def test_without_room_nothing_is_released(
    censored: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, refusals = EngineThread.check, ["too much waits"]

    def full_once(self: EngineThread, *arguments: Any, **options: Any) -> Any:
        if refusals:
            raise Overloaded(refusals.pop())
        return check(self, *arguments, **options)

    monkeypatch.setattr(EngineThread, "check", full_once)
    full, then = exchanged(censored, [{"append": "The sea is wide."}], [{"append": " And deep."}])[
        :2
    ]
    assert full["release"] == "" and full["verdict"] == "unjudged"
    assert full["checked_characters"] == 0
    assert {rule["reason"] for rule in full["unjudged"]} == {"too much waits"}
    assert then["release"] == "The sea is wide. And deep."
    refusals.append("and again")
    (last,) = exchanged(censored, [{"append": "So.", "end": True}])
    assert last["release"] == "" and last["judgement"]["verdict"] == "unjudged"


def test_a_reply_whose_tokens_cannot_be_counted_goes_on_and_is_checked_later(
    censored: Client, censor: Censor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(text: str) -> int:
        raise Overloaded("the censor is down")

    monkeypatch.setattr(censor, "text_tokens", down)
    (event,) = exchanged(censored, [{"append": "The"}, {"append": " sea is wide.", "end": True}])
    assert event["release"] == "The sea is wide." and event["judgement"]["verdict"] == "allow"


def test_what_could_not_be_judged_is_not_released(censored: Client) -> None:
    unjudged = {"append": "cannot be judged"}
    first, second, _ = exchanged(
        censored, [unjudged], [{"append": " but this can"}], [{"end": True}]
    )
    assert first["release"] == "" and first["verdict"] == "unjudged"
    assert {rule["rule"] for rule in first["unjudged"]} == {"words", "fine"}
    assert second["release"] == "cannot be judged but this can"
    (last,) = exchanged(censored, [unjudged | {"end": True}])
    assert last["release"] == "" and last["judgement"]["verdict"] == "unjudged"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{nonsense\n", "line 3 is not JSON"),
        (b'{"append": "\xff"}\n', "line 3 is not Unicode"),
        (b"[" * 100_000 + b"\n", "line 3 is nested too deeply"),
        (b'{"append": "a", "append": "b"}\n', "line 3 is not JSON: the key 'append' stands twice"),
        (b"1" * 5000 + b"\n", "line 3 is not JSON: a number has too many digits"),
        (b"[]\n", "line 3: Input should be an object"),
        (None, "line 3 is missing"),  # the body is cut off
        ({"append": 5}, "append"),
        ({"appendix": "a"}, "no such key"),
        (b'{"append": "\\ud800"}\n', "surrogate"),
        ({"append": "a" * 1_000_001}, "more than 1000000 characters"),
    ],
)
def test_a_wrong_line_ends_it(censored: Client, censor: Censor, line: object, why: str) -> None:
    (last,) = exchanged(censored, [{"append": "two words"}, line, {"append": " more", "end": True}])
    assert last["release"] == "" and last["judgement"]["verdict"] == "unjudged"
    assert why in last["judgement"]["error"]
    assert not censor.conversations


def test_very_many_short_lines_take_no_time() -> None:
    reply = GrowingReply(StreamRequest.model_validate(OPENING))
    began = time.thread_time()
    reply.take(StreamPiece(append="\N{GRINNING FACE}"))  # which makes every other character wide
    for _ in range(100_000):
        reply.take(StreamPiece(append="a"))
    assert time.thread_time() - began < 4
    assert reply.characters == 100_001 and reply.checked_characters == 0
    assert reply.conversation[-1].content == "\N{GRINNING FACE}" + "a" * 100_000
    assert len(reply.checked(Ruling.ALLOW)) == reply.checked_characters == 100_001


@pytest.mark.parametrize(
    ("character", "bytes_of_token", "due_at"), [("a", 4, 64), ("\N{GRINNING FACE}", 1, 4)]
)
def test_of_text_that_trickles_tokens_are_counted_when_there_may_be_enough(
    character: str, bytes_of_token: int, due_at: int
) -> None:
    counted: list[str] = []

    def text_tokens(text: str) -> int:
        counted.append(text)
        return len(text.encode()) // bytes_of_token

    service: Any = SimpleNamespace(text_tokens=text_tokens)
    reply = GrowingReply(StreamRequest.model_validate(OPENING | {"every_tokens": 16}))
    for _ in range(2):  # after a check as before it
        lengths = []
        for length in range(1, due_at + 1):
            reply.take(StreamPiece(append=character))
            if reply.is_due(service):
                lengths.append(length)
        assert lengths == [due_at] and len(counted) <= 13
        counted.clear()
        reply.checked(Ruling.ALLOW)


@pytest.mark.parametrize("rules", [None, ["words", "fine"]])
def test_a_removed_rule_ends_a_stream_that_names_it(
    censored: Client, rules: list[str] | None
) -> None:
    async def use(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        assert (await stream.read())["p_violation"].keys() == {"words", "fine"}
        await asyncio.to_thread(censored.delete, "/admin/rules/fine")
        stream.write({"append": " And deep.", "end": rules is not None})
        event = await stream.read()
        if rules:
            assert event["release"] == "" and event["judgement"]["verdict"] == "unjudged"
            assert "not served: fine" in event["judgement"]["error"]
        else:
            assert event["release"] == " And deep." and event["p_violation"].keys() == {"words"}

    streamed(censored, OPENING | {"rules": rules}, use)


def test_nothing_comes_behind_the_end(censored: Client) -> None:
    (last,) = exchanged(censored, [{"append": "Yes", "end": True}, {"append": " No"}])
    assert last["judgement"]["verdict"] in ("unjudged", "allow")
    assert "No" not in last["release"]


@pytest.mark.parametrize(
    ("opening", "why"),
    [
        (b"{}", "messages: Field required"),
        (b"", "the first line is missing"),
        (b"nonsense", "not JSON"),
        (json.dumps(OPENING | {"every_tokens": 0}).encode(), "every_tokens"),
        (json.dumps(OPENING | {"hold_back": -1}).encode(), "hold_back"),
        (json.dumps(OPENING | {"rules": ["nobody"]}).encode(), "not served"),
    ],
)
def test_a_wrong_first_line_is_refused(censored: Client, opening: bytes, why: str) -> None:
    response = censored.post("/v1/check/stream", content=opening)
    assert response.status_code == 422 and why in response.text
    assert response.json()["verdict"] == "unjudged"


def test_each_line_has_the_time_of_a_request_and_no_more(censor: Censor) -> None:
    async def use(stream: OpenStream) -> None:
        for word in ("one", "two", "three"):
            await asyncio.sleep(0.5)  # together longer than a request may take
            stream.write({"append": f"{word} and more"})
            assert (await stream.read())["verdict"] == "allow"
        (last,) = await stream.rest()  # nothing more is written
        assert "did not come in time" in last["judgement"]["error"]

    with serving(create_app(censor, timeout_s=1.4)) as client:
        streamed(client, OPENING, use)


def test_a_client_that_is_gone_has_no_checks_under_way(
    censored: Client, censor: Censor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(censor, "step", lambda: time.sleep(0.01))  # nothing is ever answered

    async def use(stream: OpenStream) -> None:
        stream.write(SEA)
        while not censor.open:
            await asyncio.sleep(0.01)
        stream.response.close()

    streamed(censored, OPENING, use)
    wait_until(lambda: not censor.open, 30)  # a check may take a minute
    counted = 'guard_check_failures_total{code="caller_gone"} 1.0'
    wait_until(lambda: counted in censored.get("/metrics").text)


def test_server_sent_events_are_the_same_lines(censored: Client) -> None:
    body = "\n".join(map(json.dumps, [OPENING, SEA, {"end": True}])).encode()
    response = censored.post(
        "/v1/check/stream", content=body, headers={"accept": "text/event-stream"}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *_, last = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["judgement"]["verdict"] == "allow"


def test_only_what_is_new_and_the_suffixes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.1 times of that, whatever token the text so far ends within, on the real engine."""
    engine = guard_engine()
    rules = ["medical_advice", "pii_leak", "refund_promise"]
    served = engine._rules._served
    for rule in rules:  # random adapters say about a half
        card = served[rule].card.model_copy(update={"threshold": 0.999})
        monkeypatch.setitem(served, rule, replace(served[rule], card=card))
    pieces = [" ".join(f"word{n}ing" for n in range(start, start + 6)) for start in range(0, 60, 6)]
    engine.forget()

    steps = [[{"append": piece}] for piece in pieces]
    with serving(create_app(engine)) as client:
        *events, _ = exchanged(client, *steps, [{"end": True}], rules=rules, every_tokens=16)
    assert [event["release"] for event in events] == pieces
    messages = [Message("user", ASKED[0]["content"]), Message("assistant", "".join(pieces))]
    needed = len(prompts().prefix_ids(messages))
    needed += len(events) * sum(len(prompts().suffix_ids(RULE_TEXTS[rule])) for rule in rules)
    computed = sum(event["usage"]["computed_tokens"] for event in events)
    assert needed <= computed <= 1.1 * needed
