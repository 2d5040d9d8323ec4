"""Both clients against the real server: answers, retries, deadlines, streams; and what is sent,
what a response means, and what of a reply that is being written is released.
And the client as a package of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.home import ROOT
from serve import client
from serve.api.app import create_app
from serve.client.attempts import Asked, Attempts
from serve.client.reply import Reply
from tests.serve.client.censor import ASKED, Censor
from tests.serve.serving import MESSAGES, serving

BAD = [*ASKED, {"role": "assistant", "content": "forbidden"}]
FINE = {"rule": "fine", "p_violation": 0.1, "threshold": 0.5, "confident": True, "by": "head"}
LONG = {"rule": "long", "code": "too_long", "reason": "it does not fit"}
BODY: dict[str, Any] = {"verdict": "allow", "decided_by": ["fine"], "unjudged": [LONG]}
BODY |= {"results": [FINE | {"verdict": "allow"}], "latency_ms": 1.5}
BODY |= {"usage": {"cached_tokens": 7, "computed_tokens": 3}}


class Awaited:
    """The asynchronous client, asked as the synchronous one is, in one event loop of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._guard = client.AsyncGuardClient(*arguments, **options)

    def check(self, *arguments: Any, **options: Any) -> client.CheckAnswer:
        return self._loop.run_until_complete(self._guard.check(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._guard, name)
        return lambda *given, **named: self._loop.run_until_complete(method(*given, **named))

    def guarded_stream(
        self, messages: Any, pieces: Iterable[str | None], *arguments: Any, **options: Any
    ) -> Iterator[str]:
        stream = self._guard.guarded_stream(messages, in_turn(pieces), *arguments, **options)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield self._loop.run_until_complete(anext(stream))

    def close(self) -> None:
        self._loop.run_until_complete(self._guard.close())
        self._loop.close()

    @property
    def _http(self) -> httpx.AsyncClient:
        return self._guard._http


async def in_turn(pieces: Iterable[str | None]) -> AsyncIterator[str | None]:
    for piece in pieces:
        yield piece


Guard = client.GuardClient | Awaited
Client = type[client.GuardClient] | type[Awaited]
HTTP: dict[Client, Any] = {client.GuardClient: httpx.Client, Awaited: httpx.AsyncClient}


@pytest.fixture(params=list(HTTP), ids=["synchronous", "asynchronous"])
def kind(request: pytest.FixtureRequest) -> Client:
    kind: Client = request.param
    return kind


@pytest.fixture
def engine() -> Censor:
    return Censor()


@pytest.fixture
def guard(kind: Client, engine: Censor) -> Iterator[Guard]:
    with serving(create_app(engine)) as http:
        guard = kind(str(http.base_url), http_client=HTTP[kind](trust_env=False))
        yield guard
        guard.close()


def answering(kind: Client, responses: list[httpx.Response]) -> tuple[Guard, list[httpx.Request]]:
    """A client whose server answers with these, one after the other."""
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return responses.pop(0)

    own = HTTP[kind](transport=httpx.MockTransport(handle))
    return kind("http://guard", api_key="a key", http_client=own, deadline_s=3), requests


def test_a_check_has_a_verdict_for_every_rule(guard: Guard) -> None:
    answer = guard.check(MESSAGES, ["words", "fine"])
    assert answer.is_allowed and answer.verdict == "allow"
    assert not answer.results["words"].violates and answer.results["words"].threshold == 0.25
    bad = guard.check(BAD)
    assert bad.verdict == "violation" and bad.decided_by == ("words",)
    assert bad.results["words"].violates and bad.results["words"].p_violation > 0.9
    assert not bad.explanations
    explained = guard.check(BAD, explain=True).explanations
    assert list(explained) == ["words"] and explained["words"].turn == len(ASKED)
    assert explained["words"].p_after > 0.9 > (explained["words"].p_before or 0)
    unjudged = guard.check([{"role": "user", "content": "cannot be judged"}])
    assert unjudged.verdict == "unjudged" and not unjudged.is_allowed
    why = client.RuleUnjudged("too_long", "it does not fit")
    assert unjudged.unjudged == {"words": why, "fine": why}
    with pytest.raises(client.CheckFailed, match="not served: nobody") as raised:
        guard.check(MESSAGES, ["nobody"])
    assert raised.value.status == 422


def test_stated_policies_have_answers_of_their_own(guard: Guard) -> None:
    answer = guard.check(BAD, ["fine"], policies=["never say forbidden", "never promise"])
    assert answer.decided_by == ("policies.0",) and list(answer.results) == ["fine"]
    assert [policy.violates for policy in answer.policies.values()] == [True, False]


def test_tools_are_judged_with_the_messages(guard: Guard) -> None:
    tool = {"type": "function", "function": {"name": "forbidden", "parameters": {}}}
    assert guard.check(ASKED, ["words"]).is_allowed
    assert not guard.check(ASKED, ["words"], tools=[tool]).is_allowed
    with pytest.raises(client.NotAllowed):
        list(guard.guarded_stream(ASKED, ["Fine."], ["words"], tools=[tool]))


def test_a_stream_is_released_as_far_as_it_is_allowed(guard: Guard, engine: Censor) -> None:
    pieces = ["The sea is ", "wide. It ", "is deep", ". And now the forbidden ", "word."]
    released: list[str] = []
    with pytest.raises(client.NotAllowed, match="violation: words") as raised:
        for text in guard.guarded_stream(ASKED, pieces, hold_back=0):
            released.append(text)
    assert released == ["The sea is wide. It "]
    assert raised.value.answer.decided_by == ("words",)
    assert engine.conversations[-1][-1].content == "".join(pieces[:4])


def test_an_allowed_stream_is_released_whole(guard: Guard, engine: Censor) -> None:
    pieces: list[str | None] = ["One sentence here.", " Another one", " here.", " End"]
    released = list(guard.guarded_stream(ASKED, pieces, hold_back=6))
    assert released[0] == "One sentence"
    assert "".join(released) == "One sentence here. Another one here. End"
    assert [len(messages) for messages in engine.conversations] == [2, 2, 2]
    pieces = ["The sea ", None, "is wide.", None]  # as OpenAI's last one
    assert "".join(guard.guarded_stream(ASKED, pieces)) == "The sea is wide."


def test_without_room_it_is_tried_again_after_what_the_server_says(kind: Client) -> None:
    busy = httpx.Response(503, headers={"retry-after": "0"})
    guard, requests = answering(kind, [busy, busy, httpx.Response(200, json=BODY)])
    assert guard.check(ASKED).is_allowed
    assert len(requests) == 3 and requests[0].headers["authorization"] == "Bearer a key"
    assert 0 < int(requests[0].headers["guard-timeout-ms"]) <= 3000


# What is not asked again, and a word of what is raised.
FINAL: list[tuple[dict[str, Any], str]] = [
    *(({"status_code": status, "text": "why"}, "why") for status in (400, 429, 500)),
    ({"status_code": 503, "text": "the engine failed"}, "the engine failed"),
    ({"status_code": 503, "headers": {"retry-after": ""}, "text": "it failed"}, "it failed"),
    ({"status_code": 503, "headers": {"retry-after": "60"}, "text": "too late: why"}, "too late"),
    ({"status_code": 200, "text": "<html>"}, "not JSON"),
    ({"status_code": 200, "text": "[" * 100_000}, "not JSON"),
    ({"status_code": 200, "json": {"verdict": "allow"}}, "no check"),
    ({"status_code": 200, "json": "allow"}, "no check"),
]


@pytest.mark.parametrize(("response", "told"), FINAL)
def test_no_other_answer_is_asked_for_again_and_none_is_an_allow(
    kind: Client, response: dict[str, Any], told: str
) -> None:
    responses = [httpx.Response(**response), httpx.Response(200, json=BODY)]
    guard, requests = answering(kind, responses)
    with pytest.raises(client.CheckFailed, match=told) as raised:
        guard.check(ASKED)
    assert len(requests) == 1
    assert raised.value.status == (None if told == "no check" else response["status_code"])


def test_a_client_of_the_caller_s_own_is_left_open_and_one_of_its_own_closed(kind: Client) -> None:
    own = HTTP[kind]()
    for http_client in (own, None):
        guard = kind("http://guard", http_client=http_client)
        guard.close()
        assert guard._http.is_closed == (http_client is None)


def test_a_server_that_is_gone_or_drips_its_response_in_is_no_allow(kind: Client) -> None:
    for server, why in (
        (contextlib.nullcontext("http://127.0.0.1:9"), "no response"),
        (dripping(), "before the deadline|no response"),
    ):
        with server as address:
            guard = kind(address, http_client=HTTP[kind](trust_env=False), deadline_s=0.5)
            with pytest.raises(client.CheckFailed, match=why):
                guard.check(ASKED)
            guard.close()


@pytest.mark.parametrize(("stated", "seconds"), [("2", 2.0), ("0", 0.3), ("soon", 1.0)])
def test_no_room_means_to_wait_as_the_server_says(stated: str, seconds: float) -> None:
    response = httpx.Response(503, headers={"retry-after": stated})
    assert Attempts(10).answer(response) == seconds
    with pytest.raises(client.CheckFailed, match="503"):
        Attempts(0.2).answer(response)


def test_what_cannot_be_sent_is_no_answer_and_a_single_value_is_no_list() -> None:
    for content in ("\ud800", float("nan"), b"bytes"):
        with pytest.raises(client.CheckFailed, match="cannot be sent"):
            Asked().content([{"role": "user", "content": content}])
    for field in ("rules", "tools"):
        with pytest.raises(TypeError, match=rf"{field} must be a list, got .*; write \['one'\]"):
            Asked(**{field: "one"}).content([])  # type: ignore[arg-type]


def test_a_body_that_lacks_something_is_no_answer() -> None:
    first_turn = {"fine": {"turn": 0, "p_after": 0.9}}
    answer = client.CheckAnswer.of(BODY | {"explanations": first_turn})
    assert (answer.cached_tokens, answer.computed_tokens, answer.latency_ms) == (7, 3, 1.5)
    assert answer.explanations == {"fine": client.RuleExplanation(0, None, 0.9)}
    for missing in BODY:
        with pytest.raises(client.CheckFailed, match=missing):
            client.CheckAnswer.of({key: value for key, value in BODY.items() if key != missing})
    for explanations in (None, [], {"fine": {"turn": 0}}):
        with pytest.raises(client.CheckFailed, match="no check of this version"):
            client.CheckAnswer.of(BODY | {"explanations": explanations})


def test_a_check_is_due_at_a_sentence_s_end_or_after_so_many_characters() -> None:
    reply = Reply(ASKED, check_characters=10)
    due = [reply.add(piece) for piece in ("abc", " def", "ghi", "!", "j")]
    assert due == [False, False, True, True, True]
    reply.allowed()
    assert not reply.add("k")
    assert reply.conversation == [*ASKED, {"role": "assistant", "content": "abc defghi!jk"}]


@given(st.lists(st.text(max_size=30), min_size=1), st.integers(0, 40))
def test_no_more_is_released_than_was_checked(pieces: list[str], hold_back: int) -> None:
    reply, released, text = Reply(ASKED, hold_back=hold_back), "", ""
    for piece in pieces:
        text += piece
        if reply.add(piece):
            released += reply.allowed()
            assert text.startswith(released)
            assert len(released) == max(0, len(text) - hold_back)
    assert released + reply.ended() == text


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
PAUSE_S = 0.05


@contextmanager
def dripping() -> Iterator[str]:
    """The address of a server whose answer never ends: a byte at a time, for one connection."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_drip, args=(listener, is_over))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


def _drip(listener: socket.socket, is_over: threading.Event) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(HEAD)
        while not is_over.wait(PAUSE_S):
            try:
                connection.sendall(b" ")
            except OSError:  # the client has given up
                return


ASKS = """
import sys
import centurion_client
from centurion_client import AsyncGuardClient, CheckFailed, GuardClient
assert "serve" not in sys.modules and "guard" not in sys.modules
try:
    GuardClient("http://127.0.0.1:9").check([{"role": "user", "content": "Hi"}])
except CheckFailed as failure:
    print(centurion_client.__file__, failure)
"""


@pytest.mark.slow
def test_a_wheel_of_the_client_works_outside_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "client"  # building leaves files beside the sources
    shutil.copytree(ROOT / "serve/client", source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    build = [*pip, "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("centurion_client-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)  # which is what installing it does, in seconds less
    modules = {path.name for path in (ROOT / "serve/client").glob("*.py")}
    in_package = {name.split("/")[1] for name in names if name.startswith("centurion_client/")}
    assert in_package == modules | {"py.typed"}
    asked = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{ASKS}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert str(installed) in asked.stdout and "no response from" in asked.stdout
