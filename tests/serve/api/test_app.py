"""HEAD is answered as GET is, OPTIONS and others by what there is; every request has an id."""

from __future__ import annotations

import re

import pytest
from httpx import Client

from tests.serve.api.input.every_method import PATHS, check_path
from tests.serve.api.tenants import RULE_SETS, shop_and_bank
from tests.serve.serving import Serve
from tests.serve.toy_engine import ToyEngine


@pytest.mark.parametrize("path", PATHS)
def test_every_method_of_a_path_is_answered_by_what_the_path_has(serve: Serve, path: str) -> None:
    """By a server of its own: one of the methods removes a rule."""
    check_path(serve(ToyEngine({"fine": -2.0, "more": -2.0})), path, "fine")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_no_method_finds_a_path_that_is_none_or_passes_the_keys(serve: Serve, method: str) -> None:
    engine = ToyEngine({"fine": -2.0, "flagged": -2.0})
    client = serve(engine)
    assert client.request(method, "/v1/checks").status_code == 404
    passed_on = {"x-forwarded-for": "192.0.2.1"}
    response = client.request(method, "/admin/rules/fine", headers=passed_on)
    assert response.status_code == 403
    client = serve(engine, rule_sets=RULE_SETS, tenants=shop_and_bank())
    for path in ("/metrics", "/v1/rules", "/v1/check", "/admin/rules/fine"):
        assert client.request(method, path).status_code == 401
    assert client.request(method, "/healthz").status_code in (200, 204)


@pytest.mark.parametrize(
    ("request_id", "is_one"),
    [
        ("a3f9", True),
        ("4bf92f35-77b3.1:2_x", True),
        ("x" * 64, True),
        ("", False),
        ("two words", False),
        ("x" * 65, False),
        ("<script>", False),
    ],
)
def test_a_caller_s_id_comes_back(client: Client, request_id: str, is_one: bool) -> None:
    for path in ("/v1/rules", "/nowhere"):
        answered = client.get(path, headers={"x-request-id": request_id}).headers["x-request-id"]
        assert (answered == request_id) == is_one
        assert is_one or re.fullmatch("[0-9a-f]{32}", answered)
