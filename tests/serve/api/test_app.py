"""The app as a whole: health, and formats that keep out of each other's way."""

from __future__ import annotations

from serve.api.app import FORMATS, create_app
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine


def test_no_two_formats_answer_the_same_path() -> None:
    paths = []
    for wire_format in FORMATS.values():
        paths += [route.path for route in wire_format.router.routes]
    assert paths and len(paths) == len(set(paths))
    assert "/health" not in paths


def test_health_is_ok_while_checks_are_served_and_says_when_they_are_not() -> None:
    engine = ToyEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        assert client.get("/health").json() == {"status": "ok"}
        engine.is_usable = False
        response = client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "down"})


def test_every_route_is_described() -> None:
    described = create_app(ToyEngine()).openapi()["paths"]  # type: ignore[arg-type]
    routes = {route.path for format_ in FORMATS.values() for route in format_.router.routes}
    assert {"/v1/check", "/v1/rules"} <= routes
    assert set(described) == routes | {"/health"}
