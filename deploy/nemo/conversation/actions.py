"""Rails that put the whole conversation to Centurion's rules.

Only "allow" lets pass. A violation is refused; whatever is no verdict is an error, on which NeMo
Guardrails says that an internal error has occurred, and passes nothing on.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
from nemoguardrails import RailsConfig
from nemoguardrails.actions import action
from nemoguardrails.actions.rail_outcome import RailOutcome
from nemoguardrails.llm.filters import to_chat_messages


@action()
async def centurion_check_input(
    config: RailsConfig, events: list[dict[str, Any]], context: dict[str, Any]
) -> RailOutcome:
    """The conversation up to the user's message, which is not among the events yet."""
    question = {"role": "user", "content": context["user_message"]}
    return await _check(config, [*_said(events), question])


@action()
async def centurion_check_output(
    config: RailsConfig, events: list[dict[str, Any]], context: dict[str, Any]
) -> RailOutcome:
    """The conversation with the bot's reply at its end."""
    reply = {"role": "assistant", "content": context["bot_message"]}
    return await _check(config, [*_said(events), reply])


def _said(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in to_chat_messages(events) if message["role"] != "event"]


async def _check(config: RailsConfig, messages: list[dict[str, Any]]) -> RailOutcome:
    """Raises if there is no verdict."""
    settings = config.custom_data["centurion"]
    body = {"messages": messages}
    for name in ("rules", "rule_set", "metadata"):
        if name in settings:
            body[name] = settings[name]
    headers = {}
    if "api_key_env_var" in settings:  # where the server has tenants
        headers["authorization"] = f"Bearer {os.environ[settings['api_key_env_var']]}"
    async with httpx.AsyncClient(timeout=settings["timeout_s"], headers=headers) as client:
        response = await client.post(f"{settings['url']}/v1/check", json=body)
    response.raise_for_status()
    answer = response.json()
    if answer["verdict"] == "allow":
        return RailOutcome.allow()
    if answer["verdict"] == "violation":
        return RailOutcome.block(reason=f"violates {', '.join(answer['decided_by'])}")
    raise RuntimeError("the conversation could not be judged")
