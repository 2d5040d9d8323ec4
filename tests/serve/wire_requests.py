"""Any conversation in every wire format, by the examples that the formats state. Tests only."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from serve.api.formats.table import WIRE_FORMATS
from serve.api.wire_format import RULE, ExampleRequest, WireFormat, format_of

Json = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
JSON = {"content-type": "application/json"}
HI = {"role": "user", "content": "Hi"}
_CALLS = itertools.count()


@dataclass(frozen=True)
class WireRequest:
    """A request: its path, what it sends (several values are lines of a stream)."""

    path: str
    bodies: tuple[Json, ...]

    @property
    def content(self) -> bytes:
        return "\n".join(map(json.dumps, self.bodies)).encode()

    def send(self, client: httpx.Client, **headers: str) -> httpx.Response:
        return self.send_content(client, self.content, **headers)

    def send_content(self, client: httpx.Client, content: bytes, **headers: str) -> httpx.Response:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post(self.path, content=content, headers=JSON | more)

    def renamed(self, rule: str) -> WireRequest:
        """The same request, put to another rule."""
        bodies = json.loads(json.dumps(self.bodies).replace(RULE, rule))
        return WireRequest(self.path.replace(RULE, rule), tuple(bodies))


@dataclass(frozen=True)
class Case:
    """An example of a format; a reply comes after `before`, a request of its conversation."""

    name: str
    example: ExampleRequest
    before: ExampleRequest | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.example.path} {self.example.conversation[-1]}"

    @property
    def wire_format(self) -> WireFormat:
        return WIRE_FORMATS[self.name]

    @property
    def has_messages(self) -> bool:
        """Whether whole messages are sent, and not texts alone."""
        stated = _at(self.example.body, self.example.conversation)
        return isinstance(stated, list) and isinstance(stated[0], dict)

    def requests(self, messages: Messages) -> list[WireRequest]:
        """What is sent of the conversation, of texts the last; the last answer is about it."""
        call_id = f"call-{next(_CALLS)}"
        if self.before is None:
            return [self._about(self.example, messages, call_id)]
        before = self._about(self.before, messages[:-1] or [HI], call_id)
        return [before, self._about(self.example, messages, call_id)]

    def ask(self, client: httpx.Client, messages: Messages, **headers: str) -> httpx.Response:
        for request in self.requests(messages):
            response = request.send(client, **headers)
        return response

    def say(self, client: httpx.Client, text: str, **headers: str) -> httpx.Response:
        return self.ask(client, [{"role": "user", "content": text}], **headers)

    def _about(self, example: ExampleRequest, messages: Messages, call_id: str) -> WireRequest:
        stated = _at(example.body, example.conversation)
        said: Any = list(messages)
        if isinstance(stated, str):
            said = messages[-1]["content"]
        elif isinstance(stated[0], str):
            said = [messages[-1]["content"]]
        body = copy.deepcopy(dict(example.body))
        *outer, key = example.conversation
        _at(body, outer)[key] = said
        joining = self.wire_format.call_id
        if joining in body:
            body[joining] = call_id
        return WireRequest(example.path, (body, *map(dict, example.lines)))


def _at(body: Any, keys: Sequence[str | int]) -> Any:
    for key in keys:
        body = body[key]
    return body


CASES: list[Case] = []
for _name, _format in WIRE_FORMATS.items():
    CASES += [Case(_name, example) for example in _format.requests]
    CASES += [Case(_name, example, _format.requests[0]) for example in _format.replies]
WHOLE = [case for case in CASES if case.has_messages]  # the formats of whole messages


def readings(path: str, status: int, text: str) -> Sequence[str]:
    """What the answer means to a client of its format, first as a whole: allow, violation or
    unjudged. What has no verdict is unjudged, whatever its body says.
    """
    name = format_of(WIRE_FORMATS, path)
    if status != httpx.codes.OK or name is None:
        return ["unjudged"]
    return WIRE_FORMATS[name].reading(text)


def outcome(request: Case | WireRequest, response: httpx.Response) -> str:
    path = request.example.path if isinstance(request, Case) else request.path
    return readings(path, response.status_code, response.text)[0]
