"""The app as a whole: formats that keep out of each other's way, and observers."""

from __future__ import annotations

from serve.api.app import FORMATS, create_app
from serve.api.observe.record import CheckRecord
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine

PROBES = {"/health", "/healthz", "/readyz", "/metrics"}
ADMIN = {"/admin/rules/{rule}"}


def test_no_two_formats_answer_the_same_path() -> None:
    paths = []
    for wire_format in FORMATS.values():
        paths += [route.path for route in wire_format.router.routes]
    assert paths and len(paths) == len(set(paths))
    assert not PROBES & set(paths)


class ToyObserver:
    def __init__(self) -> None:
        self.records: list[CheckRecord] = []
        self.is_closed = False

    def checked(self, record: CheckRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


def test_observers_are_told_of_every_check_and_closed_with_the_server() -> None:
    observer = ToyObserver()
    app = create_app(ToyEngine(), observers=[observer])  # type: ignore[arg-type]
    with serving(app) as client:
        for rules in (["fine"], ["crash"]):
            client.post("/v1/check", json={"messages": MESSAGES, "rules": rules})
        assert not observer.is_closed
    assert observer.is_closed
    assert [record.failure for record in observer.records] == [None, "engine_failed"]
    assert [list(record.cards) for record in observer.records] == [["fine"], ["crash"]]
    assert all(0 < record.latency_s < 60 for record in observer.records)


def test_every_route_is_described() -> None:
    described = create_app(ToyEngine()).openapi()["paths"]  # type: ignore[arg-type]
    routes = {route.path for format_ in FORMATS.values() for route in format_.router.routes}
    assert {"/v1/check", "/v1/rules"} <= routes
    assert set(described) == routes | PROBES | ADMIN
