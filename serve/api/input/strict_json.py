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
from guard.files.text_file import no_text
from serve.api.input.encodings import TYPE, charsets

# Commas and opening brackets, twice as many as ten thousand messages with all of their fields have,
# or a thousand tools.
MAX_SIGNS = 300_000
TOO_DEEP = "nested too deeply to be read"
NOT_UNICODE = "not Unicode"


class TooManyValues(ValueError):
    """The JSON has more than MAX_SIGNS commas and brackets, and with them as many values."""

    def __str__(self) -> str:
        return f"more than {MAX_SIGNS:,} commas and brackets"


def read_body(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, -16 or -32. Raises as `read_json`, and TooManyValues
    before anything is parsed.
    """
    text = decoded(content)
    # Those inside of texts do not count, and are looked for only where there are many.
    if _signs(text) > MAX_SIGNS and _signs(STRING.sub("", text)) > MAX_SIGNS:
        raise TooManyValues
    return read_json(text)


def _signs(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


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
            raise HTTPException(400, f"the body is {kind or NOT_UNICODE}") from error


class StrictRoute(APIRoute):
    """A route whose body is read by `read_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
