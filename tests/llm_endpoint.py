"""A real HTTP server that plays an OpenAI-compatible endpoint, with faults. Tests only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the endpoint does with one request: it says `text`, or sends `raw`."""

    text: str | None = "yes"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    raw: str | None = None
    delay_s: float = 0.0
    finish_reason: str = "stop"

    @property
    def payload(self) -> bytes:
        if self.raw is not None:
            return self.raw.encode()
        message = {"role": "assistant", "content": self.text}
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        choice = {"message": message, "finish_reason": self.finish_reason}
        return json.dumps({"choices": [choice], "usage": usage}).encode()


@contextmanager
def serving(answer: Callable[[dict[str, Any], str | None], Reply]) -> Iterator[str]:
    """The base URL of a server whose replies follow from a request's body and authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = answer(body, self.headers["Authorization"])
            time.sleep(reply.delay_s)
            self.send_response(reply.status)
            for name, value in reply.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.payload)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that gave up waiting, or was killed."""

    with Server(("127.0.0.1", 0), Handler) as server:
        settings = {"poll_interval": 0.01}
        threading.Thread(target=server.serve_forever, kwargs=settings, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
