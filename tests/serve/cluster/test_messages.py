from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from serve.cluster.messages import RelayedRequest, answer_in_process


def an_app() -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        headers = {"x-query": str(request.url.query), "x-one": request.headers["x-one"]}
        return Response(await request.body(), status_code=201, headers=headers)

    @app.get("/gone")
    async def gone(request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return Response()

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


def test_the_app_sees_the_request_and_its_whole_response_comes_back() -> None:
    relayed = RelayedRequest("POST", "/echo", b"a=b", ((b"x-one", b"1"),), b"text")
    answered = asyncio.run(answer_in_process(an_app(), relayed))
    assert (answered.status, answered.body) == (201, b"text")
    assert {(b"x-query", b"a=b"), (b"x-one", b"1")} <= set(answered.headers)


def test_a_caller_is_there_until_the_task_is_cancelled() -> None:
    async def run() -> None:
        asking = asyncio.ensure_future(answer_in_process(an_app(), RelayedRequest("GET", "/gone")))
        await asyncio.sleep(0.1)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(run())


def test_a_header_takes_the_place_of_those_of_its_name() -> None:
    relayed = RelayedRequest("GET", "/", headers=((b"x-one", b"1"), (b"x-one", b"2"), (b"y", b"3")))
    assert relayed.header("X-One") == "1"
    changed = relayed.with_header("X-One", "4")
    assert changed.headers == ((b"x-one", b"4"), (b"y", b"3"))
    assert changed.header("none") == ""
