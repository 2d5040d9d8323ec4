"""A body is read line by line while it comes, whatever pieces it comes in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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


def test_every_line_moves_the_deadline_and_an_error_is_raised_to_who_reads() -> None:
    scope: dict[str, Any] = {"seconds": 5.0, "deadline": 0.0}
    messages = [{"type": "http.request", "body": b"one\ntwo", "more_body": True}]

    async def receive() -> dict[str, Any]:
        if not messages:
            raise HTTPException(408, "too slow")
        return messages.pop(0)

    async def run() -> None:
        lines = BodyLines(scope, receive)
        assert await lines.next() == b"one"
        assert scope["deadline"] > time.monotonic() + 4
        for _ in range(2):
            try:
                await lines.next()
            except HTTPException as error:
                assert error.status_code == 408
            else:
                raise AssertionError("no error")
        lines.close()

    asyncio.run(run())


def test_others_are_served_while_many_short_lines_are_read() -> None:
    messages = [
        {"type": "http.request", "body": b"{}\n" * 1000, "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def run() -> int:
        lines = BodyLines({"seconds": 5.0}, receive)
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
    scope: dict[str, Any] = {"seconds": 5.0, "deadline": 0.0}
    chunks = 0

    async def receive() -> dict[str, Any]:
        nonlocal chunks
        chunks += 1
        return {"type": "http.request", "body": b"{}\n" * LINES_AHEAD, "more_body": chunks < 50}

    async def run() -> int:
        lines = BodyLines(scope, receive)
        for _ in range(3):
            assert await lines.next() == b"{}"
        for _ in range(100):
            await asyncio.sleep(0)
        received = chunks
        taken = 3
        while await lines.next() is not None:
            taken += 1
        assert taken == 50 * LINES_AHEAD
        lines.close()
        return received

    assert asyncio.run(run()) <= 3


def test_an_empty_line_moves_no_deadline() -> None:
    scope: dict[str, Any] = {"seconds": 5.0, "deadline": 0.0}
    messages = [{"type": "http.request", "body": b"\n \n\n", "more_body": True}]

    async def receive() -> dict[str, Any]:
        if not messages:
            raise HTTPException(408, "too slow")
        return messages.pop(0)

    async def run() -> None:
        lines = BodyLines(scope, receive)
        with pytest.raises(HTTPException):
            await lines.next()
        lines.close()

    asyncio.run(run())
    assert scope["deadline"] == 0.0
