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

import httpx

from serve.api.app import create_app
from tests.serve.serving import serving
from tests.serve.wire_requests import LITELLM, RULE, WireRequest, outcome, requests_of
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
        self._calls = 0

    def requests(self) -> Iterator[list[WireRequest]]:
        """One conversation in every format, and the formats of texts."""
        self._calls += 1
        messages = [self._message(role) for role in ("user", *self._roles(), "assistant")]
        for name, sequence in requests_of(messages, f"call {self._calls}").items():
            if name.startswith("agentgateway") or self._random.random() < 0.5:
                yield sequence
                continue
            (request,) = sequence
            first, *more = request.bodies
            yield [replace(request, bodies=(first | {"tools": [TOOL]}, *more))]
        for path, body in self._texts().items():
            yield [WireRequest(path, (body,))]

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

    def _message(self, role: str) -> dict[str, Any]:
        text = self._random.choice(("Hi", "Two\nlines.", "caf\u00e9", "{}"))
        part = {"type": "text", "text": text}
        message = {"role": role, "content": self._random.choice((text, [part], [part, part]))}
        if role == "assistant" and self._random.random() < 0.5:
            call = {"name": "pay", "arguments": '{"to": "Bo"}'}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
        if self._random.random() < 0.3:
            message["name"] = "bo"
        return message

    def _texts(self) -> dict[str, dict[str, Any]]:
        """The bodies of texts, by path."""
        part = {"type": "text", "text": "Hi"}
        detector = f"/{RULE}/api/v1/text"
        params = {"rules": [RULE]}
        return {
            "/v1/moderations": {"model": RULE, "input": self._random.choice(("Hi", [part, part]))},
            f"{detector}/contents": {"contents": ["Hi", "Hello"]},
            f"{detector}/generation": {"prompt": "Hi", "generated_text": "Hello"},
            f"{detector}/context/doc": {"content": "a", "context_type": "docs", "context": ["b"]},
            LITELLM: {
                "input_type": "request",
                "texts": ["Hi"],
                "request_data": {"user_api_key_team_id": "7"},
                "additional_provider_specific_params": params,
            },
        }


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


def _asked(client: httpx.Client, sequence: list[WireRequest], source: HiddenWords) -> Iterator[str]:
    for request in sequence:
        plain = outcome(request, request.send(client))
        if plain != "allow":
            yield f"{request.path} {request.bodies}: {plain}, and nothing is hidden in it"
    content = source.hide(request)
    if outcome(request, request.send_content(client, content)) == "allow":
        yield f"{request.path} {content}: allow"
