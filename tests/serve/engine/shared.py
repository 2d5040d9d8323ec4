"""What the tests of the engine share. Tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from guard.conversation.example import Message
from serve.engine import Call, Check, GuardEngine, Refusal, Score
from tests.serve.guarded import CONVERSATION, peft_logit

NATS = 2e-3  # float32: two ways to compute the same logit


def long_conversation(words: int) -> tuple[Message, ...]:
    return (Message("user", " ".join(["word"] * words)),)


def logits(outcomes: list[Score | Refusal]) -> list[float]:
    assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
    return [outcome.logit for outcome in outcomes if isinstance(outcome, Score)]


def logits_of(check: Check) -> list[float]:
    return [verdict.logit for verdict in check.verdicts]


def finish(engine: GuardEngine, *calls: Call) -> None:
    """Step until all of them are done."""
    while not all(call.done for call in calls):
        engine.step()


def assert_peft(
    engine: GuardEngine,
    rules: list[str] | None = None,
    messages: tuple[Message, ...] = CONVERSATION,
    nats: float = NATS,
) -> dict[str, float]:
    """The logits of these rules, or all, are plain PEFT's by the weights in their folders."""
    found: dict[str, float] = {}
    check = engine.check(messages, rules)
    assert not check.refused
    for verdict in check.verdicts:
        text, folder = engine.rules[verdict.rule].rule_text, engine.folder(verdict.rule)
        assert verdict.logit == pytest.approx(peft_logit(messages, text, folder), abs=nats)
        found[verdict.rule] = verdict.logit
    return found


def core_of(engine: GuardEngine) -> Any:
    """vLLM's engine core."""
    backend: Any = engine.backend
    return backend._engine.engine_core.engine_core


@contextlib.contextmanager
def steps_of(engine: GuardEngine, tokens: int) -> Iterator[None]:
    """Compute at most this many tokens in a step: a longer prompt is prefilled in chunks."""
    scheduler = core_of(engine).scheduler
    most = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = most


def runner(engine: GuardEngine) -> Any:
    """vLLM's model runner: it computes what the scheduler has already entered into the cache."""
    return core_of(engine).model_executor.driver_worker.worker.model_runner
