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

Receive = Callable[[], Awaitable[dict[str, Any]]]


def receiving(*pieces: bytes, ends: bool, then: Exception | None = None) -> Receive:
    """ASGI's receive: a body in these pieces; behind it an error, or the client is gone."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if left:
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left) or not ends}
        if then is not None:
            raise then
        return {"type": "http.disconnect"}

    return receive


def read(chunks: Sequence[bytes], *, ends: bool = True) -> tuple[list[bytes], bool]:
    """The lines of a body in these chunks, and whether its sender was gone after them."""

    async def run() -> tuple[list[bytes], bool]:
        lines = BodyLines({"seconds": 5.0}, receiving(*chunks, ends=ends))
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
    assert read([*chunks, b""]) == (whole, True)


def test_half_a_line_of_a_sender_that_is_gone_is_no_line() -> None:
    assert read([b"one\ntw"], ends=False) == ([b"one"], True)


def test_every_line_that_is_not_empty_moves_the_deadline_and_an_error_is_raised_twice() -> None:
    too_slow = HTTPException(408, "too slow")

    async def run() -> None:
        scope: dict[str, Any] = {"seconds": 5.0, "deadline": 0.0}
        empty = BodyLines(scope, receiving(b"\n \n\n", ends=False, then=too_slow))
        with pytest.raises(HTTPException):
            await empty.next()
        assert scope["deadline"] == 0.0
        lines = BodyLines(scope, receiving(b"one\ntwo", ends=False, then=too_slow))
        assert await lines.next() == b"one"
        assert scope["deadline"] > time.monotonic() + 4
        for _ in range(2):
            with pytest.raises(HTTPException, match="too slow"):
                await lines.next()
        empty.close()
        lines.close()

    asyncio.run(run())


def test_others_are_served_while_many_short_lines_are_read() -> None:
    turns_of_others = 0

    async def count() -> None:
        nonlocal turns_of_others
        while True:
            turns_of_others += 1
            await asyncio.sleep(0)

    async def run() -> None:
        lines = BodyLines({"seconds": 5.0}, receiving(b"{}\n" * 1000, ends=True))
        counting = asyncio.create_task(count())
        while await lines.next() is not None:
            pass
        counting.cancel()
        lines.close()

    asyncio.run(run())
    assert turns_of_others >= 1000


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
