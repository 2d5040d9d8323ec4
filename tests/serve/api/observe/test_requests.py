"""Every request has an id, the caller's if it is one, and its response says it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from serve.api.app import create_app
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(ToyEngine({"fine": -2.0}))) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize("request_id", ["a3f9", "4bf92f35-77b3.1:2_x", "x" * 64])
def test_a_caller_s_id_comes_back(client: httpx.Client, request_id: str) -> None:
    headers = {"x-request-id": request_id}
    response = client.post("/v1/check", json={"messages": MESSAGES}, headers=headers)
    assert response.headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", ["", "two words", "x" * 65, "<script>"])
def test_what_is_no_id_is_replaced_by_one(client: httpx.Client, request_id: str) -> None:
    for path in ("/v1/rules", "/nowhere"):
        response = client.get(path, headers={"x-request-id": request_id})
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
