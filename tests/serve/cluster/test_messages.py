from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from serve.cluster.messages import RelayedRequest, answer_in_process


def an_app() -> FastAPI:
    app = FastAPI()

    @app.get("/broken")
    async def broken() -> Response:
        raise ValueError("my address is 5 Elm Street")

    @app.get("/half")
    async def half() -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"half"
            raise ValueError("no more")

        return StreamingResponse(parts())

    return app


def test_an_error_s_response_is_the_response_and_half_of_one_is_none() -> None:
    answered = asyncio.run(answer_in_process(an_app(), RelayedRequest("GET", "/broken")))
    assert (answered.status, answered.body) == (500, b"Internal Server Error")
    with pytest.raises(ValueError, match="no more"):
        asyncio.run(answer_in_process(an_app(), RelayedRequest("GET", "/half")))


def test_a_header_takes_the_place_of_those_of_its_name() -> None:
    relayed = RelayedRequest("GET", "/", headers=((b"x-one", b"1"), (b"x-one", b"2"), (b"y", b"3")))
    assert relayed.header("X-One") == "1"
    changed = relayed.with_header("X-One", "4")
    assert changed.headers == ((b"x-one", b"4"), (b"y", b"3"))
    assert changed.header("none") == ""
