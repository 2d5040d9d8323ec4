"""A body is read line by line while it comes, whatever pieces it comes in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from serve.api.input.lines import LINES_AHEAD, BodyLines


def read(chunks: Sequence[bytes], *, ends: bool = True) -> tuple[list[bytes], bool]:
    """The lines of a body in these chunks, and whether its sender was gone after them."""
    messages: list[dict[str, Any]] = []
    for chunk in chunks:
        messages.append({"type": "http.request", "body": chunk, "more_body": True})
    if ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def run() -> tuple[list[bytes], bool]:
        lines = BodyLines({"seconds": 5.0}, receive)
        got = []
        while (line := await lines.next()) is not None:
            got.append(line)
        assert await lines.next() is None
        await asyncio.wait_for(lines.until_gone(), 5)
        lines.close()
        return got, lines.is_gone

    return asyncio.run(run())


@given(st.binary(max_size=60), st.integers(1, 7))
def test_lines_are_those_of_the_body_however_it_is_cut(body: bytes, size: int) -> None:
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    whole = [line for line in body.split(b"\n") if line.strip()]
    assert read(chunks) == (whole, True)


def test_half_a_line_of_a_sender_that_is_gone_is_no_line() -> None:
    assert read([b"one\ntw"], ends=False) == ([b"one"], True)


def receiving(*pieces: bytes, ends: bool) -> Callable[[], Awaitable[dict[str, Any]]]:
    """ASGI's receive: a body in these pieces, which then ends, or comes too slowly."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if not left and not ends:
            raise HTTPException(408, "too slow")
        if not left:
            return {"type": "http.disconnect"}
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left) or not ends}

    return receive


def test_every_line_that_is_not_empty_moves_the_deadline_and_an_error_is_raised_twice() -> None:
    async def run() -> None:
        scope: dict[str, Any] = {"seconds": 5.0, "deadline": 0.0}
        empty = BodyLines(scope, receiving(b"\n \n\n", ends=False))
        with pytest.raises(HTTPException):
            await empty.next()
        assert scope["deadline"] == 0.0
        lines = BodyLines(scope, receiving(b"one\ntwo", ends=False))
        assert await lines.next() == b"one"
        assert scope["deadline"] > time.monotonic() + 4
        for _ in range(2):
            with pytest.raises(HTTPException, match="too slow"):
                await lines.next()
        empty.close()
        lines.close()

    asyncio.run(run())


def test_others_are_served_while_many_short_lines_are_read() -> None:
    async def run() -> int:
        lines = BodyLines({"seconds": 5.0}, receiving(b"{}\n" * 1000, ends=True))
        turns_of_others = 0

        async def count() -> None:
            nonlocal turns_of_others
            while True:
                turns_of_others += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        while await lines.next() is not None:
            pass
        counting.cancel()
        lines.close()
        return turns_of_others

    assert asyncio.run(run()) >= 1000


def test_the_sender_of_more_lines_than_are_taken_waits() -> None:
    pieces = [b"{}\n" * LINES_AHEAD] * 50
    receive = receiving(*pieces, ends=True)
    received = 0

    async def counted() -> dict[str, Any]:
        nonlocal received
        received += 1
        return await receive()

    async def run() -> None:
        lines = BodyLines({"seconds": 5.0}, counted)
        for _ in range(3):
            assert await lines.next() == b"{}"
        for _ in range(100):
            await asyncio.sleep(0)
        assert received <= 3
        taken = 3
        while await lines.next() is not None:
            taken += 1
        assert taken == len(pieces) * LINES_AHEAD
        lines.close()

    asyncio.run(run())
