"""Requests that the prefix cache holds go ahead, on a real engine: by what it holds of them, and
only where priorities are a clock.

That nobody waits for ever because of it is in `tests/serve/engine/test_engine.py`, where the clock
is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest import MonkeyPatch
from vllm_alora.kv.resident import RESIDENT_FIRST

from guard.conversation.example import Message
from serve.engine import Call, GuardEngine, Score, ScoreRequest
from tests.serve.cards import RULE_TEXTS
from tests.serve.engine.shared import core_of, steps_of
from tests.serve.guarded import guard_engine

pytestmark = pytest.mark.slow

STEP_TOKENS = 512
WORDS = 600  # more than a step
ADAPTERS = {"lora": "plain", "alora": "pii_leak", None: None}


@pytest.fixture(params=[True, False])
def engine(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> Iterator[GuardEngine]:
    """The shared engine with short steps, with and without the seam's setting."""
    engine = guard_engine()
    settings = core_of(engine).vllm_config.additional_config
    monkeypatch.setitem(settings, RESIDENT_FIRST, request.param)
    engine.forget()
    with steps_of(engine, STEP_TOKENS):
        yield engine


def is_on(engine: GuardEngine) -> bool:
    return bool(core_of(engine).vllm_config.additional_config[RESIDENT_FIRST])


def conversation(number: int) -> tuple[Message, ...]:
    return (Message("user", f"Number {number}. {'word ' * WORDS}"),)


def ask(
    engine: GuardEngine, number: int, adapter: str | None = None, salt: str | None = None
) -> Call:
    return engine.submit(
        [ScoreRequest(conversation(number), RULE_TEXTS["pii_leak"], ADAPTERS[adapter], salt)]
    )


def answer(engine: GuardEngine, *asked: Call) -> None:
    while not all(each.done for each in asked):
        engine.step()


def priority(engine: GuardEngine, asked: Call) -> int:
    scheduler = core_of(engine).scheduler
    (request_id,) = asked.waiting
    return int(scheduler.requests[request_id].priority)


def test_what_the_cache_holds_goes_ahead_of_what_came_with_it(engine: GuardEngine) -> None:
    answer(engine, ask(engine, 0))
    first, second, known = [ask(engine, number) for number in (1, 2, 0)]
    order: list[Call] = []
    while len(order) < 3:
        engine.step()
        order += [each for each in (first, second, known) if each.done and each not in order]
    assert order == ([known, first, second] if is_on(engine) else [first, second, known])


@pytest.mark.parametrize("known_to", [None, "lora", "alora"])
def test_it_goes_ahead_by_the_cached_tokens(engine: GuardEngine, known_to: str | None) -> None:
    """The base and aLoRAs find each other's, a LoRA its own, and nobody another salt's."""
    answer(engine, ask(engine, 0, known_to))
    for adapter in (None, "lora", "alora"):
        for salt in (None, "another"):
            asked, clock = ask(engine, 0, adapter, salt), engine._dispatcher.virtual_time
            ahead = clock - priority(engine, asked)
            engine.cancel(asked)
            is_known = salt is None and (adapter == "lora") == (known_to == "lora")
            assert ahead > WORDS if is_known and is_on(engine) else ahead == 0
    asked, clock = ask(engine, 0, known_to), engine._dispatcher.virtual_time
    ahead = clock - priority(engine, asked)
    answer(engine, asked)
    (score,) = asked.results()
    assert isinstance(score, Score)
    assert ahead == (
        score.cached_tokens // engine.backend.block_size * engine.backend.block_size
        if is_on(engine)
        else 0
    )
