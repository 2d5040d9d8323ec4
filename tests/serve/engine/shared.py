"""What the tests of the engine share: its outcomes, conversations and model runner. Tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from guard.conversation.example import Message
from serve.engine import GuardEngine, Refusal, Score


def long_conversation(words: int) -> tuple[Message, ...]:
    return (Message("user", " ".join(["word"] * words)),)


def logits(outcomes: list[Score | Refusal]) -> list[float]:
    assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
    return [outcome.logit for outcome in outcomes if isinstance(outcome, Score)]


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
    """vLLM's model runner: it computes what the scheduler has already entered into the prefix
    cache.
    """
    core = core_of(engine)
    return core.model_executor.driver_worker.worker.model_runner
