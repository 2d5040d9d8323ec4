"""Conversations through NeMo Guardrails: run by test_nemo.py in `.venv-clients`.

Reads from stdin a list of {"config": folder, "messages": [...]}; beside these, for a reply that
comes word by word, {"streamed": reply, "is_parallel": bool, "is_given_first": bool}. Writes a list
of what the user gets: a reply, or "raised " and the error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from nemoguardrails import LLMRails, RailsConfig


async def _reply(rails: LLMRails, case: dict[str, Any]) -> str:
    if "streamed" not in case:
        answer = await rails.generate_async(messages=case["messages"])
        return str(answer["content"])

    async def words() -> AsyncIterator[str]:
        for word in case["streamed"].split(" "):
            yield f"{word} "

    given = ""
    async for piece in rails.stream_async(messages=case["messages"], generator=words()):
        given += str(piece)
    return given


def _rails(case: dict[str, Any]) -> LLMRails:
    config = RailsConfig.from_path(case["config"])
    if "streamed" in case:
        output = config.rails.output
        output.parallel = case["is_parallel"]
        settings = {"enabled": True, "chunk_size": 4, "context_size": 2}
        settings["stream_first"] = case["is_given_first"]
        output.streaming = output.streaming.model_copy(update=settings)
    return LLMRails(config)


async def main() -> None:
    outcomes = []
    for case in json.load(sys.stdin):
        try:
            outcomes.append(await _reply(_rails(case), case))
        except Exception as error:
            outcomes.append(f"raised {type(error).__name__}: {error}")
    json.dump(outcomes, sys.stdout)


asyncio.run(main())
