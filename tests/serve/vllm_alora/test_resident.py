"""Requests that the prefix cache holds go ahead, on a real engine: by what it holds of them, and only where priorities are tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_alora.resident import RESIDENT_FIRST

from guard.example import Message
from serve.engine import Asked, GuardEngine, ScoreRequest
from tests.serve.guarded import recipe

WORDS = 2500  # more than a step


@pytest.fixture(scope="module", params=[True, False])
def engine(request: pytest.FixtureRequest) -> Iterator[GuardEngine]:
    with GuardEngine(recipe(), {}, max_model_len=4096, additional_config={RESIDENT_FIRST: request.param}) as engine:
        yield engine


def is_on(engine: GuardEngine) -> bool:
    return bool(engine._core._engine.vllm_config.additional_config[RESIDENT_FIRST])


def conversation(number: int) -> tuple[Message, ...]:
    return (Message("user", f"Number {number}. {'word ' * WORDS}"),)


def ask(engine: GuardEngine, number: int) -> Asked:
    return engine.ask([ScoreRequest(conversation(number), "", None)])


def priority(engine: GuardEngine, asked: Asked) -> int:
    scheduler: Any = engine._core._engine.engine_core.engine_core.scheduler
    (request_id,) = asked.waiting
    (found,) = (request for name, request in scheduler.requests.items() if name.startswith(f"{request_id}-"))
    return int(found.priority)


def test_what_the_cache_holds_goes_ahead_of_what_was_asked_at_the_same_time(engine: GuardEngine) -> None:
    engine.forget()
    engine.score([ScoreRequest(conversation(0), "", None)])
    first, second, known = [ask(engine, number) for number in (1, 2, 0)]
    order: list[Asked] = []
    while len(order) < 3:
        engine.step()
        order += [each for each in (first, second, known) if each.done and each not in order]
    assert order == ([known, first, second] if is_on(engine) else [first, second, known])


def test_it_goes_ahead_by_the_tokens_that_the_cache_holds_and_no_further(engine: GuardEngine) -> None:
    engine.forget()
    engine.score([ScoreRequest(conversation(0), "", None)])
    clock = engine._answered_tokens
    known, new = ask(engine, 0), ask(engine, 3)
    ahead = {each: clock - priority(engine, asked) for each, asked in (("known", known), ("new", new))}
    while not (known.done and new.done):
        engine.step()
    cached = {each: outcome.cached_tokens for each, asked in (("known", known), ("new", new)) for outcome in asked.results()}
    assert cached["known"] > WORDS > 64 > cached["new"]
    assert ahead == (cached if is_on(engine) else {"known": 0, "new": 0})
