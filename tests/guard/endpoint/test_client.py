"""The client against a real HTTP server; tests/eval/judge/test_endpoint.py has every fault."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from guard.endpoint.client import ATTEMPTS, MAX_TIMEOUTS, Completion, Endpoint, read_completion
from guard.errors import GuardError
from tests.waiting import wait_until

ANSWER = {
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 1},
}
QUESTION = [{"role": "user", "content": "Is it?"}]


class ToyServer(ThreadingHTTPServer):
    """Answers with the statuses of `script` in turn, the last one for ever; 0: never."""

    daemon_threads = True
    script: tuple[int, ...] = (200,)
    requests = 0
    closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class ToyHandler(BaseHTTPRequestHandler):
    server: ToyServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        script = self.server.script
        status = script[min(self.server.requests, len(script) - 1)]
        self.server.requests += 1
        if status == 0:
            self.server.closing.wait(10)
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ToyServer(("127.0.0.1", 0), ToyHandler)
    server.closing = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def ask(endpoint: Endpoint) -> Completion:
    async def question() -> Completion:
        async with endpoint.client() as client:
            return await endpoint.complete(client, QUESTION, "case 1")

    return asyncio.run(question())


def test_an_answer_comes_as_it_is_with_what_it_cost(server: ToyServer) -> None:
    endpoint = Endpoint(server.url, "toy", price_in=1.0, price_out=2.0)
    completion = ask(endpoint)
    assert (completion.text, completion.finish_reason, completion.refused) == ("yes", "stop", False)
    assert (completion.prompt_tokens, completion.completion_tokens) == (7, 1)
    assert completion.latency_ms > 0
    assert endpoint.cost_usd(7, 1) == pytest.approx(9e-6)
    assert Endpoint(server.url, "toy").cost_usd(7, 1) is None


def test_a_passing_failure_is_tried_again_and_a_lasting_one_ends(server: ToyServer) -> None:
    endpoint = Endpoint(server.url, "toy", backoff_s=0.001, role="generator")
    server.script = (500, 429, 200)
    assert ask(endpoint).text == "yes"
    assert server.requests == 3
    server.requests, server.script = 0, (503,)
    with pytest.raises(
        GuardError, match=r"generator's endpoint failed 8 times on case 1.*HTTP 503"
    ):
        ask(endpoint)
    assert server.requests == ATTEMPTS


@pytest.mark.parametrize(
    "fault",
    [
        httpx.Response(429, headers={"Retry-After": "Mon, 1 Jan 99999999999 1:1:1 GMT"}),
        httpx.Response(200, content=b"[" * 200_000),
    ],
    ids=["a year that is none", "nested too deeply"],
)
def test_what_python_cannot_read_is_a_passing_failure(fault: httpx.Response) -> None:
    replies = iter([fault, httpx.Response(200, json=ANSWER)])

    async def question() -> Completion:
        transport = httpx.MockTransport(lambda _: next(replies))
        async with httpx.AsyncClient(transport=transport) as client:
            endpoint = Endpoint("http://x/v1", "toy", backoff_s=0.001)
            return await endpoint.complete(client, QUESTION, "case 1")

    assert asyncio.run(question()).text == "yes"


def test_an_endpoint_that_is_too_slow_is_not_asked_for_ever(server: ToyServer) -> None:
    server.script = (0,)
    endpoint = Endpoint(server.url, "toy", backoff_s=0.001, timeout_s=0.2)
    with pytest.raises(
        GuardError, match=r"no answer about case 1 in 0.2 s, 2 times.*JUDGE_TIMEOUT_S"
    ):
        ask(endpoint)
    wait_until(lambda: server.requests >= MAX_TIMEOUTS)  # a busy server counts late
    assert server.requests == MAX_TIMEOUTS


def test_a_text_that_is_not_taken_is_refused_and_a_wrong_key_is_an_error(server: ToyServer) -> None:
    endpoint = Endpoint(server.url, "toy", backoff_s=60.0)
    server.script = (403,)
    assert ask(endpoint).refused
    server.script = (401,)
    with pytest.raises(GuardError, match=r"cannot be asked about case 1.*HTTP 401.*JUDGE_API_KEY"):
        ask(endpoint)
    assert server.requests == 2


@pytest.mark.parametrize("count", [None, -1, True, "7", 1.5])
def test_a_token_count_that_is_none_is_left_out(count: object) -> None:
    completion = read_completion(ANSWER | {"usage": {"prompt_tokens": count}}, 1.0)
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)


def test_the_key_is_not_shown_in_any_notation() -> None:
    endpoint = Endpoint("http://x/v1", "toy", 'sk-"secret')
    shown = endpoint.shown(
        f"{endpoint.api_key}\n{json.dumps(endpoint.api_key)} {endpoint.api_key!r}"
    )
    assert "secret" not in shown and "\n" not in shown
    assert "secret" not in repr(endpoint)


def test_a_message_without_content_is_an_empty_answer() -> None:
    completion = read_completion({"choices": [{"message": {"role": "assistant"}}]}, 1.0)
    assert completion.text == ""
