"""What HTTP adds to a check: the same engine asked directly and by `/v1/check`, in turns."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import uvicorn

from guard.example import Message
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.api.app import create_app
from serve.bench.http.server import random_runs, rule_names
from serve.bench.workload.prompts import conversation
from serve.engine import GuardEngine
from serve.engine.adapter import trained

WARM_UP = 3  # pairs that are not counted


def as_body(messages: Sequence[Message], rules: Sequence[str]) -> dict[str, Any]:
    """The request of a check."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return {"messages": turns, "rules": list(rules)}


def overhead(
    recipe: Recipe, rules: int, tokens: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each call of the engine, and of each request; every conversation is new.

    The engine is asked by one at a time: its thread waits while it is asked directly.
    """
    prompts = PromptBuilder.of(recipe)
    names = rule_names(rules)
    count = 2 * (repeats + WARM_UP)
    conversations = [conversation(prompts, tokens, 7000 + number) for number in range(count)]
    engine_ms: list[float] = []
    http_ms: list[float] = []
    with random_runs(recipe, rules) as runs:
        folders = trained(runs, recipe.name, recipe.sharing_methods[0], None)
        with GuardEngine(recipe, folders) as engine, _ServedEngine(engine) as client:
            for number in range(0, count, 2):
                first, second = conversations[number : number + 2]
                started = time.perf_counter()
                engine.check(first, names)
                between = time.perf_counter()
                client.post("/v1/check", json=as_body(second, names)).raise_for_status()
                ended = time.perf_counter()
                engine_ms.append(1000 * (between - started))
                http_ms.append(1000 * (ended - between))
                time.sleep(0.01)  # the engine's thread reads its counters after an answer
    return engine_ms[WARM_UP:], http_ms[WARM_UP:]


class _ServedEngine:
    """The app around an engine, on a free port of this machine."""

    def __init__(self, engine: GuardEngine) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(create_app(engine), log_level="critical"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}
        )
        address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._client = httpx.Client(base_url=address, timeout=60, trust_env=False)

    def __enter__(self) -> httpx.Client:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
