"""An app on a free port of this machine, and those who ask it. Tests only."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from serve.api.input.bounded_heads import BoundedHeads
from tests.serve.guarded import CONVERSATION

Serve = Callable[..., httpx.Client]  # the fixture `serve` of tests/serve/api: engine in, client out
MESSAGES = [{"role": message.role, "content": message.content} for message in CONVERSATION]


@contextmanager
def serving(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the app, which is stopped at the end as a signal would stop it."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, http=BoundedHeads, ws="none", log_level="critical")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=address, timeout=300, trust_env=False) as client:
                while not server.started:
                    assert thread.is_alive(), "the server did not start; its log says why"
                    time.sleep(0.01)
                yield client
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def waiting_caller(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[None]:
    """One who has sent this request, waits for as long as the block, and is gone then."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(content)}\r\n\r\n"
    address = (client.base_url.host, client.base_url.port or 0)
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head.encode() + content)
        yield


@contextmanager
def openai_client(client: httpx.Client) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the server that `client` speaks to, which tries everything once."""
    with openai.OpenAI(
        base_url=f"{client.base_url}/v1",
        api_key="none is needed",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as sdk:
        yield sdk
