"""Tenants over HTTP: each asks its own rules, as much as it may, and learns nothing of another."""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from httpx import Client
from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from serve.api.access import Access, Caller, _is_from_here
from serve.api.catalogue import Catalogue
from serve.tenants.key_ring import KeyRing
from serve.tenants.tenant import Tenant, TenantLimits
from serve.tenants.tenant_file import Tenants
from tests.serve.api.tenants import BANK, HEADERS, LOGITS, RULE_SETS, shop_and_bank
from tests.serve.serving import Serve
from tests.serve.toy_engine import ToyEngine

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(LOGITS)


@pytest.fixture
def client(engine: ToyEngine, serve: Serve) -> Client:
    return serve(engine, rule_sets=RULE_SETS, tenants=shop_and_bank())


def ask(client: Client, tenant: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/check", json={"messages": HELLO, **fields}, headers=HEADERS[tenant])


def moderate(client: Client, tenant: str, texts: int) -> None:
    body = {"input": ["Hello"] * texts}
    assert client.post("/v1/moderations", json=body, headers=HEADERS[tenant]).is_success


def test_probes_need_no_key_and_other_reads_do(client: Client) -> None:
    assert client.get("/health").status_code == 200
    for path in ("/v1/rules", "/v1/rule_sets", "/v1/models", "/metrics", "/nowhere"):
        assert client.get(path).status_code == 401
    assert client.get("/metrics", headers=HEADERS["shop"]).status_code == 403
    listed = client.get("/v1/rules", headers=HEADERS["admin"]).json()
    assert [rule["rule"] for rule in listed] == list(LOGITS)
    assert client.get("/v1/models", headers=HEADERS["admin"]).status_code == 403
    # What begins as an administrator's path is not one.
    path, body = "/metrics_leak/api/v1/text/contents", {"contents": ["Hi"]}
    assert client.post(path, json=body, headers=HEADERS["admin"]).status_code == 403
    assert client.post(path, json=body, headers=HEADERS["shop"]).status_code == 404


@pytest.mark.parametrize("tail", ["%0A", "%0D", "%00", "%7F"])
def test_a_path_with_a_control_character_is_no_route_s(client: Client, tail: str) -> None:
    for headers in ({}, *HEADERS.values()):
        assert client.get(f"/metrics{tail}", headers=headers).status_code == 404
        stream = client.post(f"/v1/check/stream{tail}", json={"messages": HELLO}, headers=headers)
        assert (stream.status_code, stream.json()["verdict"]) == (404, "unjudged")


def test_a_tenant_sees_and_asks_the_rules_of_its_own_sets_alone(client: Client) -> None:
    listed = client.get("/v1/rules", headers=HEADERS["bank"]).json()
    asked = ask(client, "bank").json()["results"]
    for rules in (listed, asked):
        assert [rule["rule"] for rule in rules] == ["fine", "flagged"]
    assert ask(client, "bank", rule_set="strict").json()["verdict"] == "violation"
    for tenant, fields in (
        ("shop", {"rule_set": "strict"}),
        ("shop", {"rules": ["flagged"]}),
        ("bank", {"rules": ["secret"]}),
    ):
        refused = ask(client, tenant, **fields)
        assert (refused.status_code, refused.json()["verdict"]) == (422, "unjudged")


def test_requests_beyond_a_limit_are_refused(client: Client, engine: ToyEngine) -> None:
    engine.may_step.clear()
    with ThreadPoolExecutor(2) as pool:
        under_way = pool.submit(ask, client, "shop")
        while not engine.open:
            time.sleep(0.001)
        refused = ask(client, "shop")
        assert (refused.status_code, refused.json()["verdict"]) == (429, "unjudged")
        assert int(refused.headers["retry-after"]) > 0
        other = pool.submit(ask, client, "bank")
        engine.may_step.set()
        assert (under_way.result(10).status_code, other.result(10).status_code) == (200, 200)
    assert ask(client, "shop").status_code == 200


def test_texts_of_one_request_wait_for_the_limit(client: Client, engine: ToyEngine) -> None:
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, sum(not call.done for _, call in engine.open))

    engine.on_step = count
    for tenant, allowed in (("shop", 1), ("bank", 8)):
        most = 0
        moderate(client, tenant, texts=8)
        assert 0 < most <= allowed
    assert most > 1


def test_a_check_s_time_counts_from_its_arrival(client: Client, engine: ToyEngine) -> None:
    engine.on_step = lambda: time.sleep(0.2)
    moderate(client, "shop", texts=3)  # one after the other: each waits for those before
    metrics = client.get("/metrics", headers=HEADERS["admin"]).text
    seconds = re.findall(r"^guard_check_seconds_sum\S* (\S+)", metrics, re.MULTILINE)
    assert sum(map(float, seconds)) >= 0.2 + 0.4 + 0.6


def test_every_tenant_has_a_salt_of_its_own(client: Client, engine: ToyEngine) -> None:
    for tenant in ("shop", "bank"):
        for salt in ({}, {"cache_salt": "bank/"}):
            assert ask(client, tenant, **salt).is_success
    assert engine.salts == ["shop/", "shop/bank/", "bank/", "bank/bank/"]


@pytest.mark.parametrize(
    ("client", "headers", "is_here"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        (None, {}, False),
        ("192.0.2.7", {}, False),
        ("2001:db8::7", {}, False),
        ("localhost.example", {}, False),
        ("::1", {"x-forwarded-for": "127.0.0.1"}, False),
        ("::1", {"forwarded": "for=127.0.0.1"}, False),
        ("::1", {"via": "1.1 here"}, False),
        ("::1", {"x-real-ip": "127.0.0.1"}, False),
        ("::1", {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, False),
        ("::1", {"sec-fetch-site": "same-site"}, False),
        ("::1", {"origin": "https://evil.example"}, False),
        ("::1", {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, True),
        ("::1", {"sec-fetch-site": "none"}, True),
    ],
)
def test_a_request_of_this_machine_is_of_no_proxy_and_of_no_other_site_s_page(
    client: str | None, headers: dict[str, str], is_here: bool
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "client": client and (client, 4000), "headers": raw}
    assert _is_from_here(scope) == is_here


def test_a_path_in_front_of_the_server_hides_no_admin_s_path() -> None:
    access = Access(_nowhere, Catalogue({}, RULE_SETS), shop_and_bank(), _refused)
    scope = {"type": "http", "headers": [(b"x-api-key", b"shop's key")], "root_path": "/guard"}
    for path in ("/guard/admin/rules/fine", "/guard/metrics"):
        with pytest.raises(HTTPException) as refused:
            access._caller(scope | {"path": path})
        assert refused.value.status_code == 403


def test_without_tenants_rules_are_changed_from_here(engine: ToyEngine, serve: Serve) -> None:
    client = serve(engine)
    # uvicorn takes the word of a proxy on this machine for who sent a request.
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    for method in ("POST", "DELETE"):
        refused = client.request(method, "/admin/rules/flagged", headers=elsewhere)
        assert refused.status_code == 403 and "TENANTS" in refused.json()["error"]
    assert client.get("/v1/rules", headers=elsewhere).status_code == 200
    assert engine.replaced == []
    assert client.delete("/admin/rules/flagged").status_code == 200


def test_a_conversation_that_is_asked_several_times_counts_once_and_equal_texts_each() -> None:
    caller = Caller(Catalogue({}, {}), Tenant("bank", (), TenantLimits(characters=100)))
    turns = [Message("user", "a" * 40), Message("assistant", "b" * 40)]
    caller.check_size([turns[:1], turns, (*turns, Message("user", "d" * 20))])
    replies = [Message("assistant", letter * 20) for letter in "cde"]
    caller.check_size([(*turns[:1], reply) for reply in replies])
    for too_much in ([turns, [Message("user", "x" * 40)]], [turns[:1]] * 3, [turns, turns]):
        with pytest.raises(HTTPException, match="120 characters"):
            caller.check_size(too_much)


def test_a_long_explanation_fits_the_limit_that_its_conversation_does(client: Client) -> None:
    turns = [{"role": "user", "content": f"turn {number}....."} for number in range(9)]
    answer = ask(client, "bank", messages=turns, rule_set="strict", explain=True)
    assert answer.status_code == 200, answer.text
    assert "flagged" in answer.json()["explanations"]


def test_a_tenant_without_a_limit_leaves_room_for_others_where_there_are_any() -> None:
    lone = Tenants((BANK,), KeyRing({}))
    for owners, most in ((lone, 10), (shop_and_bank(), 5)):
        access = Access(_nowhere, Catalogue({}, RULE_SETS), owners, _refused, max_requests=10)
        bank = access._callers["bank"]
        bank.under_way = {"request": most, "stream": 0}
        assert (bank.reached_limit("request"), bank.reached_limit("stream")) == (most, None)
        bank.under_way["request"] -= 1
        assert bank.reached_limit("request") is None
    shop = access._callers["shop"]
    shop.under_way["stream"] = 1  # its own limit is of both together
    assert (shop.reached_limit("request"), shop.reached_limit("stream")) == (1, 1)


async def _nowhere(*_: Any) -> None: ...


def _refused(*_: Any) -> Any: ...


def test_a_tenant_without_a_limit_leaves_others_room_in_the_engine() -> None:
    """One request may have many checks, so that a share of the requests would fill the engine."""
    caller = Caller(Catalogue({}, {}), shares={"request": 2, "stream": 2})
    under_way, most = 0, 0

    async def check() -> None:
        nonlocal under_way, most
        async with caller.room:
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

    async def at_once() -> None:
        await asyncio.gather(*(check() for _ in range(8)))

    asyncio.run(at_once())
    assert most == 2
