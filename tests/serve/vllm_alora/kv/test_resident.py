"""Requests go ahead by what the prefix cache holds of them, on a real engine, and only where
priorities are a clock. That nobody waits for ever because of it: tests/serve/engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest import MonkeyPatch
from vllm_alora.kv.resident import RESIDENT_FIRST

from guard.conversation.example import Message
from serve.engine import Call, Score, ScoreRequest
from tests.serve.cards import RULE_TEXTS
from tests.serve.engine.shared import core_of, steps_of
from tests.serve.guarded import guard_engine

pytestmark = pytest.mark.slow

WORDS = 600  # more than a step
ADAPTERS = {"lora": "plain", "alora": "pii_leak", None: None}
CONVERSATION = (Message("user", "word " * WORDS),)


@pytest.fixture(params=[True, False], ids=["on", "off"])
def is_on(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> Iterator[bool]:
    """The seam's setting of the shared engine, which has short steps."""
    engine = guard_engine()
    settings = core_of(engine).vllm_config.additional_config
    monkeypatch.setitem(settings, RESIDENT_FIRST, request.param)
    engine.forget()
    with steps_of(engine, 512):
        yield request.param


def asked_ahead(adapter: str | None, salt: str | None = None) -> tuple[Call, int]:
    """A request of the adapter, and how far it is ahead of the clock."""
    engine = guard_engine()
    rule = ScoreRequest(CONVERSATION, RULE_TEXTS["pii_leak"], ADAPTERS[adapter], salt)
    call = engine.submit([rule])
    (request_id,) = call.waiting
    request = core_of(engine).scheduler.requests[request_id]
    return call, engine._dispatcher.virtual_time - int(request.priority)


def answered(call: Call) -> Score:
    while not call.done:
        guard_engine().step()
    (score,) = call.results()
    assert isinstance(score, Score)
    return score


@pytest.mark.parametrize("known_to", [None, "lora", "alora"])
def test_it_goes_ahead_by_the_cached_tokens(known_to: str | None, *, is_on: bool) -> None:
    """The base and aLoRAs find each other's, a LoRA its own, and nobody another salt's."""
    answered(asked_ahead(known_to)[0])
    for adapter in ADAPTERS:
        for salt in (None, "another"):
            call, ahead = asked_ahead(adapter, salt)
            guard_engine().cancel(call)
            is_known = salt is None and (adapter == "lora") == (known_to == "lora")
            assert ahead > WORDS if is_known and is_on else ahead == 0
    call, ahead = asked_ahead(known_to)
    block = guard_engine().backend.block_size
    assert ahead == is_on * (answered(call).cached_tokens // block * block)
