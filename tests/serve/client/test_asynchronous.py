"""The asynchronous client says and sends what the synchronous one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from serve.api.app import create_app
from serve.client import AsyncGuardClient, CheckFailed, NotAllowed
from tests.serve.client.censor import ASKED, Censor
from tests.serve.client.dripping import dripping
from tests.serve.serving import serving


async def in_pieces(*pieces: str) -> AsyncIterator[str]:
    for piece in pieces:
        yield piece


def test_checks_and_streams_are_those_of_the_synchronous_client() -> None:
    async def run(base_url: str) -> None:
        async with (
            httpx.AsyncClient(trust_env=False) as own,
            AsyncGuardClient(base_url, http_client=own) as guard,
        ):
            answers = await asyncio.gather(*(guard.check(ASKED) for _ in range(5)))
            assert all(answer.is_allowed for answer in answers)
            with pytest.raises(CheckFailed, match="not served"):
                await guard.check(ASKED, ["nobody"])
            pieces = in_pieces("The sea. ", "And the forbidden word.")
            released: list[str] = []
            with pytest.raises(NotAllowed):
                async for text in guard.guarded_stream(ASKED, pieces, hold_back=0):
                    released.append(text)
            assert released == ["The sea. "]

    with serving(create_app(Censor())) as http:
        asyncio.run(run(str(http.base_url)))


def test_no_room_is_tried_again() -> None:
    responses = [httpx.Response(503, headers={"retry-after": "0"}), httpx.Response(500, text="why")]

    async def run() -> None:
        transport = httpx.MockTransport(lambda _: responses.pop(0))
        async with httpx.AsyncClient(transport=transport) as own:
            await AsyncGuardClient("http://guard", http_client=own).check(ASKED)

    with pytest.raises(CheckFailed, match="why"):
        asyncio.run(run())
    assert responses == []


def test_a_client_of_the_caller_s_own_is_left_open_and_one_of_its_own_closed() -> None:
    async def run() -> None:
        async with httpx.AsyncClient() as own:
            async with AsyncGuardClient("http://guard", http_client=own):
                pass
            assert not own.is_closed
        async with AsyncGuardClient("http://guard") as guard:
            pass
        assert guard._http.is_closed

    asyncio.run(run())


def test_a_response_that_drips_in_ends_at_the_deadline() -> None:
    async def run(address: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as own:
            await AsyncGuardClient(address, http_client=own, deadline_s=0.5).check(ASKED)

    with dripping() as address, pytest.raises(CheckFailed, match="no response"):
        asyncio.run(run(address))
