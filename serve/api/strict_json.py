"""Bodies in which no key stands twice: readers of JSON differ in which one counts, so what is
judged here could be other than what is sent on. Knows nothing of what a body says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


def read_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, UTF-16 or UTF-32. Raises ValueError for another one, and
    for a key that stands twice in an object.
    """
    return json.loads(content, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise json.JSONDecodeError(f"the key {repeated!r} stands twice", "", 0)
    return values


class _StrictRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, which is handed a request that reads so."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
