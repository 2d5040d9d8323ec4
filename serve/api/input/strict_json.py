"""JSON that came over HTTP: a body, or a line of a stream. `guard/files/strict_json.py` parses it.

A body of very many values is refused, since reading it would hold up all other requests. Knows
nothing of what a body says.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from json import detect_encoding
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from guard.files.strict_json import STRING, decoded, read_json
from guard.files.text_file import GZIP, no_text
from serve.api.input.encodings import ENCODING, TYPE, charsets

# Twice as many as ten thousand messages with all of their fields have, or a thousand tools.
MAX_VALUES = 300_000
TOO_DEEP = "nested too deeply to be read"
NOT_UNICODE = "not Unicode"


class TooManyValues(ValueError):
    """The JSON has more than MAX_VALUES values."""

    def __str__(self) -> str:
        return f"more than {MAX_VALUES:,} values"


def read_body(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, -16 or -32. Raises as `read_json`, and TooManyValues."""
    text = decoded(content)
    # n values have at most n + 1 opening brackets and fewer than n commas. So their number shows
    # that there are too many before anything is parsed. Those inside of texts do not count, and
    # are looked for only where there are many.
    if _signs(text) > 2 * MAX_VALUES and _signs(STRING.sub("", text)) > 2 * MAX_VALUES:
        raise TooManyValues
    value = read_json(text)
    _refuse_many(value)
    return value


def _signs(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _refuse_many(value: Any) -> None:
    """Raise TooManyValues for a value with more than MAX_VALUES others in it, at any depth."""
    count = 0
    containers = [value] if isinstance(value, (dict, list)) else []
    while containers:
        container = containers.pop()
        inner = container.values() if isinstance(container, dict) else container
        count += len(inner)
        if count > MAX_VALUES:
            raise TooManyValues
        containers += [element for element in inner if isinstance(element, (dict, list))]


class _StrictRequest(Request):
    async def json(self) -> Any:
        content = await self.body()
        encoding = detect_encoding(content)
        named = list(charsets(self.headers.getlist(TYPE)))
        if named and not encoding.startswith("utf-8"):
            raise HTTPException(415, f"{TYPE}: the charset is {named[0]}; the body is {encoding}")
        try:
            return read_body(content)
        except TooManyValues as error:
            raise HTTPException(413, f"the body has {error}") from error
        except RecursionError as error:
            raise HTTPException(422, f"the body is {TOO_DEEP}") from error
        except UnicodeDecodeError as error:
            kind = no_text(content) if encoding == "utf-8" else ""
            remedy = f"; send it with `{ENCODING}: gzip`" if content.startswith(GZIP) else ""
            raise HTTPException(400, f"the body is {kind or NOT_UNICODE}{remedy}") from error


class StrictRoute(APIRoute):
    """A route whose body is read by `read_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
