"""Requests of every format with a violating word where a reader may pass it over: under an unknown
key, or under one that stands twice, at any depth.

Each request is allowed by `WordEngine` as it is. With the word in it no answer may be an allow.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from httpx import Client

from serve.api.app import create_app
from serve.api.wire_format import RULE
from tests.serve.serving import serving
from tests.serve.wire_requests import CASES, WireRequest, outcome
from tests.serve.word_engine import WORDS, WordEngine

WORD = WORDS[RULE]
KEYS = (
    *("content_blocks", "parts", "blocks", "body", "value", "message", "delta", "Content", "TEXT"),
    *("documents", "context", "system", "instructions", "transcript", "title", "a key", ""),
    # Known ones, whose values are no words.
    *("index", "created", "usage", "cache_control"),
)
FUNCTION = {"name": "pay", "description": "Pays.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TAKE_TOOLS = ("check", "turns", "stream", "openai_chat", "detectors", "litellm")


class Repeated(dict[str, Any]):
    """An object with one key twice, whose other value is written first or last."""

    def __init__(self, values: dict[str, Any], key: str, other: Any, *, is_first: bool) -> None:
        super().__init__(values)
        self.other = {key: other}
        self.is_first = is_first


def written(value: Any) -> str:
    """The value as JSON, with the keys that stand twice."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    pairs = list(value.items())
    if isinstance(value, Repeated):
        other = list(value.other.items())
        pairs = other + pairs if value.is_first else pairs + other
    return f"{{{', '.join(f'{json.dumps(key)}: {written(inner)}' for key, inner in pairs)}}}"


class HiddenWords:
    """Requests by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def requests(self) -> Iterator[list[WireRequest]]:
        """One conversation in every format; of texts alone its last."""
        messages = [self._message(role) for role in ("user", *self._roles(), "assistant")]
        for case in CASES:
            if not case.has_messages:
                yield case.requests([{"role": "user", "content": self._text()}])
                continue
            *before, last = case.requests(messages)
            if case.name in TAKE_TOOLS and self._random.random() < 0.5:
                first, *more = last.bodies
                last = replace(last, bodies=(first | {"tools": [TOOL]}, *more))
            yield [*before, last]

    def hide(self, request: WireRequest) -> str:
        """What the request sends, with the word hidden in one of its objects."""
        bodies = json.loads(json.dumps(request.bodies))
        objects = [found for body in bodies for found in self._objects(body)]
        target = self._random.choice(objects)
        if target and self._random.random() < 0.5:
            hidden = self._repeat(target)
        else:
            hidden = target | {self._random.choice(KEYS): self._value()}
        lines = [written(_replaced(body, target, hidden)) for body in bodies]
        return "\n".join(lines)

    def _repeat(self, target: dict[str, Any]) -> Repeated:
        key, is_first = self._random.choice(list(target)), self._random.random() < 0.5
        return Repeated(target, key, self._value(), is_first=is_first)

    def _value(self) -> Any:
        values = (WORD, [WORD], {"text": WORD}, [{"type": "text", "text": WORD}], [[WORD]])
        return self._random.choice(values)

    def _objects(self, value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield value
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            for element in inner:
                yield from self._objects(element)

    def _roles(self) -> list[str]:
        return self._random.choices(("system", "user", "assistant"), k=self._random.randrange(3))

    def _text(self) -> str:
        return self._random.choice(("Hi", "Two\nlines.", "caf\u00e9", "{}"))

    def _message(self, role: str) -> dict[str, Any]:
        text = self._text()
        part = {"type": "text", "text": text}
        message = {"role": role, "content": self._random.choice((text, [part], [part, part]))}
        if role == "assistant" and self._random.random() < 0.5:
            call = {"name": "pay", "arguments": '{"to": "Bo"}'}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
        if self._random.random() < 0.3:
            message["name"] = "bo"
        return message


def _replaced(value: Any, target: dict[str, Any], hidden: dict[str, Any]) -> Any:
    """The value with `hidden` in place of the object `target`, that one and no equal one."""
    if value is target:
        return hidden
    if isinstance(value, list):
        return [_replaced(element, target, hidden) for element in value]
    if isinstance(value, dict):
        return {key: _replaced(inner, target, hidden) for key, inner in value.items()}
    return value


def hide_words(seed: int, conversations: int) -> list[str]:
    """Ask with as many conversations; what was answered wrongly, in words."""
    source, wrong = HiddenWords(seed), []
    with serving(create_app(WordEngine())) as client:  # type: ignore[arg-type]
        for _ in range(conversations):
            for sequence in source.requests():
                wrong += _asked(client, sequence, source)
    return wrong


def _asked(client: Client, sequence: list[WireRequest], source: HiddenWords) -> Iterator[str]:
    for request in sequence:
        plain = outcome(request, request.send(client))
        if plain != "allow":
            yield f"{request.path} {request.bodies}: {plain}, and nothing is hidden in it"
    content = source.hide(request)
    if outcome(request, request.send_content(client, content.encode())) == "allow":
        yield f"{request.path} {content}: allow"
