"""One conversation in every wire format, and what each answers about it. Tests only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

RULE = "medical_advice"
LITELLM = "/beta/litellm_basic_guardrail_api"
Json = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class WireRequest:
    """A request: its path, what it sends (several values are lines of a stream), its headers."""

    path: str
    bodies: tuple[Json, ...]
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, client: httpx.Client) -> httpx.Response:
        """Send it as JSON."""
        return self.send_content(client, "\n".join(map(json.dumps, self.bodies)))

    def send_content(self, client: httpx.Client, content: str) -> httpx.Response:
        """Send another content in its place."""
        headers = {"content-type": "application/json"} | self.headers
        return client.post(self.path, content=content.encode(), headers=headers)


def requests_of(messages: Messages, call_id: str) -> dict[str, list[WireRequest]]:
    """The requests by which each format of whole messages puts one conversation to RULE, by the
    name of the format; the last one's answer is about it. `call_id`, new each time, joins two.
    """
    rules = {"guard-rules": RULE}
    call = {"call-id": call_id} | rules
    *before, last = messages
    replies = {"body": {"choices": [{"index": 0, "message": last}]}}
    return {
        "check": [WireRequest("/v1/check", (_check(messages),))],
        "turns": [WireRequest("/v1/check/turns", (_check(messages),))],
        "stream": [WireRequest("/v1/check/stream", (_check(messages), {"end": True}))],
        "openai_chat": [
            WireRequest("/v1/chat/completions", ({"model": RULE, "messages": messages},))
        ],
        "detectors": [WireRequest(f"/{RULE}/api/v1/text/chat", ({"messages": messages},))],
        "litellm": [WireRequest(LITELLM, (_litellm(messages),))],
        "agentgateway": [WireRequest("/request", ({"body": {"messages": messages}},), rules)],
        "agentgateway reply": [
            WireRequest("/request", ({"body": {"messages": before}},), call),
            WireRequest("/response", (replies,), call),
        ],
    }


def _check(messages: Messages) -> Json:
    return {"messages": messages, "rules": [RULE]}


def _litellm(messages: Messages) -> Json:
    return {
        "input_type": "request",
        "structured_messages": messages,
        "request_data": {"user_api_key_hash": "88dc28"},
        "additional_provider_specific_params": {"rules": [RULE]},
    }


def outcome(request: WireRequest, response: httpx.Response) -> str:
    """What the answer means to a client of its format: allow, violation or unjudged."""
    if response.status_code != httpx.codes.OK:
        return "unjudged"
    body = json.loads(response.text.splitlines()[-1])
    if request.path.startswith(f"/{RULE}/"):
        return "violation" if any(body) else "allow"
    return OUTCOMES[request.path](body)


OUTCOMES: dict[str, Callable[[Any], str]] = {
    "/v1/check": lambda body: str(body["verdict"]),
    "/v1/check/turns": lambda body: str(body["verdict"]),
    "/v1/check/stream": lambda body: str(body["judgement"]["verdict"]),
    "/v1/chat/completions": lambda body: (
        "violation" if body["choices"][0]["message"]["content"] == "yes" else "allow"
    ),
    "/v1/moderations": lambda body: (
        "violation" if any(result["flagged"] for result in body["results"]) else "allow"
    ),
    LITELLM: lambda body: "violation" if body["action"] == "BLOCKED" else "allow",
    "/request": lambda body: "violation" if "status_code" in body["action"] else "allow",
    "/response": lambda body: "violation" if "status_code" in body["action"] else "allow",
}
