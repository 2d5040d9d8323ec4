"""A reply is judged while it is written: what is released when, and what it costs. Its lines are
read as they come, whatever pieces they come in.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.formats.stream import GrowingReply, StreamPiece, StreamRequest
from serve.api.input.lines import LINES_AHEAD, BodyLines
from serve.api.observe.audit import AuditLog
from serve.api.observe.record import StreamRecord
from serve.engine.refusals import Overloaded
from serve.engine.thread.engine_thread import EngineThread
from serve.policy.ruling import Ruling
from tests.serve.api.observe.toy_record import Records
from tests.serve.api.streaming import OpenStream, open_stream, streamed
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.client.censor import ASKED, Censor
from tests.serve.guarded import guard_engine
from tests.serve.serving import serving
from tests.waiting import wait_until

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


def test_text_is_released_while_the_body_is_still_sent_until_a_violation(
    censored: Client, censor: Censor
) -> None:
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
    first, last = exchanged(censored, [SEA], [{"append": " so very forbidden"}])
    assert (first["release"], last["release"]) == ("The sea is", "")
    assert last["judgement"]["verdict"] == "violation"
    assert last["judgement"]["decided_by"] == ["words"]


def test_a_check_is_due_at_a_sentence_s_end(censored: Client, censor: Censor) -> None:
    events = exchanged(censored, [{"append": "Yes."}], [{"end": True}], hold_back=2)
    # The last ones wait for the next check; at the end nothing was new.
    assert [event["release"] for event in events] == ["Ye", "s."] and said(censor) == ["Yes."]
    censor.conversations.clear()
    lines = [{"append": "Yes."}, {"append": " No", "end": True}]
    (event,) = exchanged(censored, lines, at_sentence_ends=False)
    assert said(censor) == [event["release"]] == ["Yes. No"]


def test_what_could_not_be_judged_is_not_released_until_a_later_check_allows_it(
    censored: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    unjudged = {"append": "cannot be judged"}
    can, end = [{"append": " but this can"}], [{"end": True}]
    first, second, _ = exchanged(censored, [unjudged], can, end)
    assert first["release"] == "" and first["verdict"] == "unjudged"
    assert {rule["rule"] for rule in first["unjudged"]} == {"words", "fine"}
    assert second["release"] == "cannot be judged but this can"
    (last,) = exchanged(censored, [unjudged | {"end": True}])
    assert last["release"] == "" and last["judgement"]["verdict"] == "unjudged"
    # Nor what there was no room for.
    check, refusals = EngineThread.check, ["too much waits"]

    def full_once(self: EngineThread, *arguments: Any, **options: Any) -> Any:
        if refusals:
            raise Overloaded(refusals.pop())
        return check(self, *arguments, **options)

    monkeypatch.setattr(EngineThread, "check", full_once)
    wide, deep = [{"append": "The sea is wide."}], [{"append": " And deep."}]
    full, then, *_ = exchanged(censored, wide, deep)
    assert (full["release"], full["verdict"], full["checked_characters"]) == ("", "unjudged", 0)
    assert {rule["reason"] for rule in full["unjudged"]} == {"too much waits"}
    assert then["release"] == "The sea is wide. And deep."
    refusals.append("and again")
    (last,) = exchanged(censored, [{"append": "So.", "end": True}])
    assert last["release"] == "" and last["judgement"]["verdict"] == "unjudged"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{nonsense\n", "line 3 is not JSON"),
        (b'{"append": "\xff"}\n', "line 3 is not Unicode"),
        (b"[" * 100_000 + b"\n", "line 3 is nested too deeply"),
        (None, "line 3 is missing"),  # the body is cut off
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


def test_of_text_that_trickles_or_comes_in_very_many_pieces_a_check_is_due_in_time() -> None:
    def text_tokens(text: str) -> int:
        if "down" in text:
            raise Overloaded("the engine is being started again")
        return len(text) // 4

    service: Any = SimpleNamespace(text_tokens=text_tokens)
    opening = OPENING | {"every_tokens": 16, "at_sentence_ends": False}
    reply = GrowingReply(StreamRequest.model_validate(opening))
    for first, due_at in (("a", 64), ("a", 64), ("down", 253)):  # by characters at the latest
        pieces = 0
        while not (pieces and reply.is_due(service)):
            reply.take(StreamPiece(append="a" if pieces else first))
            pieces += 1
        assert pieces == due_at
        reply.checked(Ruling.ALLOW)
    for _ in range(100_000):
        reply.take(StreamPiece(append="a"))
    assert reply.is_due(service) and reply.conversation[-1].content.endswith("a" * 100_000)


def test_a_removed_rule_ends_a_stream_that_names_it(censored: Client) -> None:
    async def use(stream: OpenStream) -> None:
        stream.write({"append": "The sea is wide."})
        assert (await stream.read())["p_violation"].keys() == {"words", "fine"}
        async with open_stream(censored, OPENING) as of_all_rules:
            await asyncio.to_thread(censored.delete, "/admin/rules/fine")
            of_all_rules.write({"append": "And deep."})
            assert (await of_all_rules.read())["p_violation"].keys() == {"words"}
        stream.write({"append": " And deep.", "end": True})
        event = await stream.read()
        assert event["release"] == "" and event["judgement"]["verdict"] == "unjudged"
        assert "not served: fine" in event["judgement"]["error"]

    streamed(censored, OPENING | {"rules": ["words", "fine"]}, use)


def test_a_wrong_first_line_is_refused(censored: Client) -> None:
    for opening, why in (
        (b"", "the first line is missing"),
        (b"nonsense", "not JSON"),
        (json.dumps(OPENING | {"every_tokens": 0}).encode(), "every_tokens"),
        (json.dumps(OPENING | {"rules": ["nobody"]}).encode(), "not served"),
    ):
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


def test_a_stream_has_one_receipt_and_no_unjudged_character_stands_under_an_allow(
    censor: Censor,
) -> None:
    records = Records()
    pieces_sent = st.sampled_from(["Yes.", " and on", " cannot be judged", " forbidden.", ""])

    @given(st.lists(pieces_sent), st.integers(0, 9), st.booleans())
    @settings(max_examples=50, deadline=None)
    def holds(pieces: list[str], hold_back: int, is_cut: bool) -> None:
        lines: list[object] = [{"append": piece} for piece in pieces]
        if not is_cut:
            lines.append({"end": True})
        *_, last = events = exchanged(client, lines, hold_back=hold_back)
        stream = records.streams.pop()
        assert not records.streams
        assert stream.released == sum(len(event["release"]) for event in events)
        assert stream.released <= stream.judged <= stream.came <= len("".join(pieces))
        assert stream.verdict == last["judgement"]["verdict"]
        if stream.verdict == "allow":
            assert stream.judged == stream.came == stream.released
        elif is_cut and stream.verdict == "unjudged":
            assert (stream.ending, stream.failure) == ("cut_off", "request_refused")

    with serving(create_app(censor, observers=[records])) as client:
        holds()


def test_a_receipt_says_how_a_stream_ended_and_without_one_there_is_no_allow(
    censor: Censor, tmp_path: Path
) -> None:
    def full(record: StreamRecord) -> None:
        raise OSError("the disk is full")

    audit = tmp_path / "audit.jsonl"
    log = AuditLog(audit)
    with serving(create_app(censor, observers=[log])) as client:
        exchanged(client, [{"append": "Yes. It is"}, {"end": True}], hold_back=2)
        exchanged(client, [{"append": "so forbidden."}])
        exchanged(client, [{"append": "Yes."}], ["nonsense"])
        log.streamed = full  # type: ignore[method-assign]
        (last,) = exchanged(client, [{"append": "Yes.", "end": True}])
    assert (last["release"], last["judgement"]["verdict"]) == ("", "unjudged")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    keys = ("verdict", "ending", "came", "judged", "released", "held")
    streams = [line for line in lines if line["kind"] == "stream"]
    assert [tuple(line[key] for key in keys) for line in streams] == [
        ("allow", "end", 10, 10, 10, 0),
        ("violation", "violation", 13, 13, 0, 13),
        ("unjudged", "failed", 4, 4, 4, 0),
    ]
    kinds = [line["kind"] for line in lines]
    assert kinds[:5] == ["version", "check", "stream", "check", "stream"]
    assert "forbidden" not in audit.read_text()


@pytest.mark.slow
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


def receiving(*pieces: bytes, ends: bool) -> Callable[[], Awaitable[dict[str, Any]]]:
    """ASGI's receive: a body in these pieces; behind it the client is gone."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if left:
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left) or not ends}
        return {"type": "http.disconnect"}

    return receive


def read(chunks: Sequence[bytes], *, ends: bool = True) -> list[bytes]:
    """The lines of a body in these chunks, whose sender is gone after them."""

    async def run() -> list[bytes]:
        lines = BodyLines({"seconds": 5.0}, receiving(*chunks, ends=ends))
        got = []
        while (line := await lines.next()) is not None:
            got.append(line)
        assert await lines.next() is None
        await asyncio.wait_for(lines.until_gone(), 5)
        lines.close()
        assert lines.is_gone
        return got

    return asyncio.run(run())


@given(st.binary(max_size=60), st.integers(1, 7))
def test_lines_are_those_of_the_body_however_it_is_cut(body: bytes, size: int) -> None:
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    assert read([*chunks, b""]) == [line for line in body.split(b"\n") if line.strip()]
    whole = [line for line in body.split(b"\n")[:-1] if line.strip()]
    assert read([*chunks, b""], ends=False) == whole  # the sender is gone amid the last


def test_the_sender_of_more_lines_than_are_taken_waits_and_others_are_served_meanwhile() -> None:
    pieces = [b"{}\n" * LINES_AHEAD] * 50
    receive = receiving(*pieces, ends=True)
    received = served = 0

    async def counted() -> dict[str, Any]:
        nonlocal received
        received += 1
        return await receive()

    async def serve_others() -> None:
        nonlocal served
        while True:
            served += 1
            await asyncio.sleep(0)

    async def run() -> int:
        lines = BodyLines({"seconds": 5.0}, counted)
        others = asyncio.create_task(serve_others())
        await asyncio.sleep(0.05)
        assert received <= 3
        taken = 0
        while await lines.next() is not None:
            taken += 1
        others.cancel()
        lines.close()
        return taken

    assert asyncio.run(run()) == len(pieces) * LINES_AHEAD <= served
