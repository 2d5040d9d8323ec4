"""The body of a request as lines, while it is still being sent. Knows nothing of what they say."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope

from serve.api.input.limits import STREAM_S

# Lines that wait to be read; beyond that the sender waits, and nobody sees whether it has gone.
LINES_AHEAD = 1024


class BodyLines:
    """Reads ahead, and knows whether the sender is still there, as long as no more than LINES_AHEAD
    lines wait. For one event loop; close it.

    Every line that is not empty gives its sender the request's time anew for the next one, STREAM_S
    in all.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._until = time.monotonic() + STREAM_S
        self._lines: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(LINES_AHEAD)
        self._gone = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    @property
    def has_more(self) -> bool:
        return not self._lines.empty()

    async def next(self) -> bytes | None:
        """The next line that is not empty, None after the last. Raises HTTPException 408 or 413."""
        await asyncio.sleep(0)  # lets others be served between many short lines
        line = await self._lines.get()
        if line is None or isinstance(line, Exception):
            self._lines.put_nowait(line)  # the answer stays the same whenever it is asked
        if isinstance(line, Exception):
            raise line
        return line

    async def until_gone(self) -> AsgiMessage:
        """ASGI's `receive` for those who ask only whether the sender is still there."""
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def deadline(self) -> float:
        seconds: float = self._scope["seconds"]
        return min(time.monotonic() + seconds, self._until)

    def close(self) -> None:
        """Read no more, and do not wait for that.

        asyncio.wait_for may miss a cancellation where something comes in at the same moment; the
        reading then ends with the response.
        """
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            await self._split()
        except Exception as error:  # to whoever takes the lines
            await self._lines.put(error)
            return
        await self._lines.put(None)
        if not self.is_gone:
            await self._received()  # nothing but a disconnect can come any more

    async def _split(self) -> None:
        unfinished: list[bytes] = []  # pieces of the last line: joined once, however many come
        more = True
        while more:
            message = await self._received()
            if self.is_gone:
                return
            more = message.get("more_body", False)
            piece, *next_lines = message.get("body", b"").split(b"\n")
            unfinished.append(piece)
            for line in next_lines:
                await self._put(b"".join(unfinished))
                unfinished = [line]
        await self._put(b"".join(unfinished))

    async def _received(self) -> AsgiMessage:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
        return message

    async def _put(self, line: bytes) -> None:
        if line.strip():
            await self._lines.put(line)
            self._scope["deadline"] = self.deadline()  # of the next one, from now on
