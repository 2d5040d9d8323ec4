"""HEAD is answered as GET is, OPTIONS by what there is, and another method by the same."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from serve.api.app import create_app
from tests.serve.api.input.every_method import PATHS, check_path
from tests.serve.api.tenants import RULE_SETS, shop_and_bank
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(ToyEngine({"fine": -2.0, "more": -2.0}))) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_every_method_of_a_path_is_answered_by_what_the_path_has(path: str) -> None:
    """A server of its own: one of the methods removes a rule."""
    with serving(create_app(ToyEngine({"fine": -2.0, "more": -2.0}))) as client:  # type: ignore[arg-type]
        check_path(client, path, "fine")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_by_no_method_is_there_a_path_that_is_none_or_administration_for_a_proxy(
    client: httpx.Client, method: str
) -> None:
    assert client.request(method, "/v1/checks").status_code == 404
    passed_on = {"x-forwarded-for": "192.0.2.1"}
    response = client.request(method, "/admin/rules/fine", headers=passed_on)
    assert response.status_code == 403


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_no_method_goes_past_the_keys(method: str) -> None:
    engine = ToyEngine({"fine": -2.0, "flagged": -2.0})
    app = create_app(engine, rule_sets=RULE_SETS, tenants=shop_and_bank())  # type: ignore[arg-type]
    with serving(app) as client:
        for path in ("/metrics", "/v1/rules", "/v1/check", "/admin/rules/fine"):
            assert client.request(method, path).status_code == 401
        assert client.request(method, "/healthz").status_code in (200, 204)
