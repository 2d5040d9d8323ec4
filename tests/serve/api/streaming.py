"""A client that writes a request's body while it reads the answer. Tests only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from httpx import Client


class OpenStream:
    """A reply on its way to the server: `write` a line, `read` one."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.response: aiohttp.ClientResponse

    async def body(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    def write(self, line: object) -> None:
        """Send a line: bytes as they are, anything else as JSON; None ends the body."""
        if not isinstance(line, bytes | None):
            line = json.dumps(line).encode() + b"\n"
        self._lines.put_nowait(line)

    async def read(self) -> dict[str, Any]:
        """The next line of the answer; empty once there is none."""
        line = await asyncio.wait_for(self.response.content.readline(), 20)
        event: dict[str, Any] = json.loads(line) if line else {}
        return event

    async def rest(self) -> list[dict[str, Any]]:
        events = []
        while event := await self.read():
            events.append(event)
        return events


@asynccontextmanager
async def open_stream(
    http: Client, opening: object, headers: dict[str, str] | None = None
) -> AsyncIterator[OpenStream]:
    """A stream to the server of `http`, which has answered with its head."""
    stream = OpenStream()
    stream.write(opening)
    url = f"{str(http.base_url).rstrip('/')}/v1/check/stream"
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.post(url, data=stream.body(), headers=headers) as response,
    ):
        stream.response = response
        assert response.status == 200, await response.text()
        yield stream
        stream.write(None)


def streamed(
    http: Client,
    opening: object,
    use: Callable[[OpenStream], Awaitable[Any]],
    headers: dict[str, str] | None = None,
) -> Any:
    async def run() -> Any:
        async with open_stream(http, opening, headers) as stream:
            return await use(stream)

    return asyncio.run(run())
