"""An app on a free port of this machine. Tests only."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from tests.serve.guarded import CONVERSATION

MESSAGES = [{"role": message.role, "content": message.content} for message in CONVERSATION]


@contextmanager
def serving(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the app, which is stopped at the end as a signal would stop it."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
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
def openai_client(client: httpx.Client) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the server that `client` speaks to, which tries everything once."""
    with openai.OpenAI(
        base_url=f"{client.base_url}/v1",
        api_key="none is needed",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as sdk:
        yield sdk
