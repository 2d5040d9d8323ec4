"""What is refused before it is read; tests/serve/api/test_check.py has the limits of one body."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.api.app import create_app
from serve.api.limits import MAX_BYTES
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine


def test_more_requests_than_may_be_under_way_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.api.limits.MAX_REQUESTS", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    body = {"messages": MESSAGES, "rules": ["fine"]}
    with serving(create_app(engine)) as client, ThreadPoolExecutor(1) as other:  # type: ignore[arg-type]
        under_way = other.submit(client.post, "/v1/check", json=body)
        while not engine.open:
            time.sleep(0.001)
        response = client.post("/v1/check", json=body)
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert client.get("/health").status_code == 200
        engine.may_step.set()
        assert under_way.result(10).status_code == 200
        assert client.post("/v1/check", json=body).status_code == 200


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(is_stated: bool) -> None:
    body: bytes | Iterator[bytes] = b" " * (MAX_BYTES + 1)
    if not is_stated:
        body = iter([b" " * 2**20] * (MAX_BYTES // 2**20 + 1))
    kind = {"content-type": "application/json"}
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", content=body, headers=kind)
        assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
        check = {"messages": MESSAGES, "rules": ["fine"]}
        assert client.post("/v1/check", json=check).status_code == 200
