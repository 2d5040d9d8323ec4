"""What a wire format states of itself.

`tests/serve/api/test_wire_format.py` holds each format to it, and a cluster finds by it which
conversation a request belongs to. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import APIRouter
from fastapi.routing import APIRoute

from serve.engine.codes import Code

# What the example requests of all formats put to one rule.
RULE = "medical_advice"
ASKED = {"role": "user", "content": "My head hurts."}
REPLY = {"role": "assistant", "content": "Drink a glass of water."}

ErrorBody = Callable[[int, str, Code], dict[str, Any]]


@dataclass(frozen=True)
class ExampleRequest:
    """A request that puts ASKED, REPLY or both to RULE.

    `conversation` are the keys under which the body has them: as messages, texts, or one text.
    `lines` follow the body where a request has several.
    """

    path: str
    body: Mapping[str, Any]
    conversation: tuple[str | int, ...]
    lines: tuple[Mapping[str, Any], ...] = ()


class Beginning(NamedTuple):
    """What a request's conversation begins with: messages and the tools beside them, or a text."""

    messages: Sequence[Any] = ()
    tools: Any = None
    text: Any = None


@dataclass(frozen=True)
class WireFormat:
    """What one kind of client speaks: the FORMAT of each module of `formats`.

    `reading` says how a client reads the body of a status 200: the ruling of the whole, then of its
    parts. `error_body` is the JSON of every other status, by the status, a message, and why there
    is no verdict. `malformed` is the status of a request whose fields are not the format's.

    `replies` are requests whose conversation came before, with one of `requests`, and which the
    body's key `call_id` joins to it. `is_reply` tells their bodies. The examples of such a format
    have the id of a call.
    """

    router: APIRouter  # its paths are its own, and no other format's
    error_body: ErrorBody
    reading: Callable[[str], Sequence[str]]
    requests: tuple[ExampleRequest, ...]
    replies: tuple[ExampleRequest, ...] = ()
    call_id: str = ""
    malformed: int = 422
    is_reply: Callable[[Mapping[str, Any]], bool] = lambda body: False

    def has_path(self, path: str) -> bool:
        """Whether a route has the path, whatever the HTTP method."""
        routes = self.router.routes
        return any(isinstance(route, APIRoute) and route.path_regex.match(path) for route in routes)

    def beginning(self, body: Mapping[str, Any]) -> Beginning | None:
        """What the conversation in any JSON object begins with; None for a reply, or if none is."""
        if self.is_reply(body):
            return None
        for example in self.requests:
            holder: Any = {}
            content: Any = body
            for key in example.conversation:
                holder = content if isinstance(content, dict) else {}
                content = holder.get(key)
            if isinstance(content, list) and content and isinstance(content[0], dict):
                return Beginning(messages=content, tools=holder.get("tools"))
            if content and isinstance(content, list):
                return Beginning(text=content[0])
            if content:
                return Beginning(text=content)
        return None


def format_of(formats: Mapping[str, WireFormat], path: str) -> str | None:
    """The name of the format with a route of this path; None if no format has one."""
    for name, wire_format in formats.items():
        if wire_format.has_path(path):
            return name
    return None
