"""A server on an engine without a model, for the tests of formats and observers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from serve.api.app import create_app
from tests.serve.client.censor import Censor
from tests.serve.serving import Serve, openai_client, serving
from tests.serve.toy_engine import LOGITS, RULE_SETS, ToyEngine


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts the app around an engine for as long as the test runs, and gives a client of it."""
    with ExitStack() as servers:

        def start(engine: Any, **settings: Any) -> httpx.Client:
            return servers.enter_context(serving(create_app(engine, **settings)))

        yield start


@pytest.fixture(scope="module")
def engine() -> ToyEngine:
    return ToyEngine(LOGITS)


@pytest.fixture(scope="module")
def client(engine: ToyEngine) -> Iterator[httpx.Client]:
    with serving(create_app(engine, rule_sets=RULE_SETS)) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture
def sdk(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai_client(client) as sdk:
        yield sdk


@pytest.fixture
def censor() -> Censor:
    return Censor()


@pytest.fixture
def censored(censor: Censor) -> Iterator[httpx.Client]:
    """A client of a server whose rule "words" forbids a word."""
    with serving(create_app(censor)) as client:
        yield client
