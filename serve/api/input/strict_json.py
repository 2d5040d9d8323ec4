"""Bodies in which no key stands twice: readers of JSON differ in which one counts, so what is
judged here could differ from what is sent on. And none has so many values that reading them
holds up everybody else. Knows nothing of what a body says.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

# Of a body: ten thousand messages with all of their fields, or a thousand tools, have half as many.
MAX_VALUES = 300_000
TOO_DEEP = "nested too deeply to be read"
NOT_UNICODE = "not Unicode"
# One without an end goes to the text's: so none is looked at twice.
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class TooManyValues(ValueError):
    """What a body, or a line of one, has that is too large to be read beside others."""

    def __str__(self) -> str:
        return f"more than {MAX_VALUES:,} values"


def read_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, UTF-16 or UTF-32.

    Raises JSONDecodeError for another one, for a key that stands twice in an object and for a
    number of thousands of digits, UnicodeDecodeError for what is no Unicode, RecursionError for
    what is nested too deeply, and TooManyValues for more than MAX_VALUES.
    """
    text = content.decode(json.detect_encoding(content), "surrogatepass")
    _refuse_many_signs(text)
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's, whose words are for whoever runs it
        raise json.JSONDecodeError("a number has too many digits", "", 0) from None
    _refuse_many(value)
    return value


def _refuse_many_signs(text: str) -> None:
    """Raise TooManyValues where that can be said without reading the values: n of them have less
    than n commas and no more than n + 1 brackets that open.
    """
    if _signs(text) > 2 * MAX_VALUES and _signs(STRING.sub("", text)) > 2 * MAX_VALUES:
        raise TooManyValues


def _signs(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise json.JSONDecodeError(f"the key {repeated!r} stands twice", "", 0)
    return values


def _refuse_many(value: Any) -> None:
    """Raise TooManyValues for more than MAX_VALUES values, in lists too."""
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
        try:
            return read_json(await self.body())
        except TooManyValues as error:
            raise HTTPException(413, f"the body has {error}") from error
        except RecursionError as error:
            raise HTTPException(422, f"the body is {TOO_DEEP}") from error
        except UnicodeDecodeError as error:
            raise HTTPException(400, f"the body is {NOT_UNICODE}") from error


class StrictRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, which gets a request that is read by `read_json`."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
