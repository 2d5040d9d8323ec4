"""What HTTP adds to a check: the same engine asked directly and by `/v1/check`, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.api.app import create_app
from serve.bench.http.server import random_runs, rule_names, served_here
from serve.bench.scores import judged
from serve.bench.workload.prompts import conversation
from serve.engine import GuardEngine
from serve.engine.adapter import trained

WARM_UP = 3  # pairs that are not counted
REST_S = 0.01  # before each call: the engine's thread reads its counters after an answer

Ask = Callable[[tuple[Message, ...]], object]


def as_body(messages: Sequence[Message], rules: Sequence[str]) -> dict[str, Any]:
    """The body of a check's request."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return {"messages": turns, "rules": list(rules)}


def judged_answer(response: httpx.Response) -> dict[str, Any]:
    """The answer to a check, in which every rule has a verdict.

    Raises GuardError if a rule was not judged, HTTPStatusError for an error status.
    """
    answer: dict[str, Any] = response.raise_for_status().json()
    if answer["unjudged"]:
        raise GuardError("a rule was not judged", got=answer["unjudged"][0], remedy="make doctor")
    return answer


def overhead(
    recipe: Recipe, rules: int, tokens: int, repeats: int
) -> tuple[list[float], list[float]]:
    """The milliseconds of each direct call of the engine, and of each HTTP request. Every
    conversation is new.

    Only one asks the engine at a time: its thread waits while it is called directly.
    """
    prompts = PromptBuilder.of(recipe)
    names = rule_names(rules)
    count = 2 * (repeats + WARM_UP)
    conversations = [conversation(prompts, tokens, 7000 + number) for number in range(count)]
    with random_runs(recipe, rules) as runs:
        folders = trained(runs, recipe.name, recipe.sharing_methods[0], None)
        with GuardEngine(recipe, folders) as engine, served_here(create_app(engine)) as client:

            def over_http(messages: tuple[Message, ...]) -> None:
                judged_answer(client.post("/v1/check", json=as_body(messages, names)))

            def directly(messages: tuple[Message, ...]) -> None:
                judged(engine.check(messages, names), where="the engine")

            engine_ms, http_ms = in_turns((directly, over_http), conversations)
    return engine_ms[WARM_UP:], http_ms[WARM_UP:]


def in_turns(
    ways: tuple[Ask, Ask], conversations: Sequence[tuple[Message, ...]]
) -> list[list[float]]:
    """The milliseconds of both ways to ask; each way gets every second conversation.

    The first of a pair may have to wake sleeping threads. So the ways take turns in going first,
    and each goes after the same rest.
    """
    took_ms: list[list[float]] = [[], []]
    for number, messages in enumerate(conversations):
        way = (number + number // 2) % 2
        time.sleep(REST_S)
        started = time.perf_counter()
        ways[way](messages)
        took_ms[way].append(1000 * (time.perf_counter() - started))
    return took_ms
