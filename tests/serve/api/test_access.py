"""Tenants over HTTP: each asks its own rules, as much as it may, and learns nothing of another."""

from __future__ import annotations

import asyncio
import re
import socket
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
from serve.policy.rule_set import RuleSet
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


def test_probes_need_no_key_and_other_reads_do(client: Client) -> None:
    assert client.get("/healthz").status_code == 200
    admin = ("/metrics", "/admin/rules", "/admin/rules/fine")
    for path in ("/v1/rules", "/v1/models", "/v1/check", *admin, "/no", "/health"):
        for method in ("GET", "HEAD", "OPTIONS"):
            assert client.request(method, path).status_code == 401
    for path in admin:
        assert client.get(path, headers=HEADERS["shop"]).status_code == 403
    listed = client.get("/v1/rules", headers=HEADERS["viewer"]).json()
    assert [rule["rule"] for rule in listed] == list(LOGITS)
    assert client.get("/v1/models", headers=HEADERS["viewer"]).status_code == 403
    # What begins as an admin's path is not one.
    path, body = "/metrics_leak/api/v1/text/contents", {"contents": ["Hi"]}
    assert client.post(path, json=body, headers=HEADERS["viewer"]).status_code == 403
    assert client.post(path, json=body, headers=HEADERS["shop"]).status_code == 404


def test_what_a_proxy_may_read_as_two_ends_the_connection_whoever_asks(client: Client) -> None:
    head = b"GET http://here/v1/rules HTTP/1.1\r\nhost: here\r\n"
    framing = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    address = client.base_url.host, client.base_url.port
    for sent, status in ((head + framing, b"400"), (head + b"connection: close\r\n\r\n", b"401")):
        with socket.create_connection(address, timeout=30) as connection:  # type: ignore[arg-type]
            connection.sendall(sent + head + b"\r\n")
            said = b"".join(iter(lambda: connection.recv(65536), b""))
        assert said.startswith(b"HTTP/1.1 " + status) and said.count(b"HTTP/1.1 ") == 1


def test_a_path_with_a_control_character_is_no_route_s(client: Client) -> None:
    for tail in ("%0A", "%00", "%7F"):
        for headers in ({}, *HEADERS.values()):
            assert client.get(f"/metrics{tail}", headers=headers).status_code == 404


def test_a_tenant_sees_and_asks_the_rules_of_its_own_sets_alone(
    client: Client, engine: ToyEngine
) -> None:
    listed = client.get("/v1/rules", headers=HEADERS["bank"]).json()
    asked = ask(client, "bank").json()["results"]
    for rules in (listed, asked):
        assert [rule["rule"] for rule in rules] == ["fine", "flagged"]
    assert ask(client, "bank", rule_set="strict").json()["verdict"] == "violation"
    assert ask(client, "shop", cache_salt="bank/").json()["verdict"] == "allow"
    assert engine.salts == ["bank/", "bank/", "shop/bank/"]  # each has its own
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


def test_texts_of_one_request_wait_for_the_limit_and_that_counts_as_their_time(
    client: Client, engine: ToyEngine
) -> None:
    under_way: list[int] = []

    def count() -> None:
        time.sleep(0.02)
        under_way.append(sum(not call.done for _, call in engine.open))

    engine.on_step = count
    for tenant, allowed in (("shop", 1), ("bank", 8)):
        under_way.clear()
        body = {"input": ["Hello"] * 8}
        assert client.post("/v1/moderations", json=body, headers=HEADERS[tenant]).is_success
        assert 0 < max(under_way) <= allowed
        if tenant == "shop":  # one after the other: each waits for those before
            metrics = client.get("/metrics", headers=HEADERS["viewer"]).text
            seconds = re.findall(r"^guard_check_seconds_sum\S* (\S+)", metrics, re.MULTILINE)
            assert sum(map(float, seconds)) >= 0.02 * sum(range(1, 9))
    assert max(under_way) > 1


def test_an_admin_may_what_its_role_may_and_is_told_which_one_it_lacks(
    client: Client, engine: ToyEngine
) -> None:
    for role in ("viewer", "reviewer", "publisher"):
        for path in ("/metrics", "/admin/rules"):
            assert client.get(path, headers=HEADERS[role]).status_code == 200
    for role in ("viewer", "reviewer"):
        for method in ("POST", "DELETE"):
            refused = client.request(method, "/admin/rules/flagged", headers=HEADERS[role])
            assert refused.status_code == 403
            assert f"needs the role publisher; the key of {role}-1 has" in refused.json()["error"]
    assert "flagged" in engine.rules and not engine.replaced
    assert client.delete("/admin/rules/secret", headers=HEADERS["publisher"]).status_code == 200


LOCAL = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
OF_PROXIES = [{name: "127.0.0.1"} for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip")]
OF_OTHER_SITES = [
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "https://evil.example"},
]
OF_OWN_PAGE = [
    {},
    {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
]


def test_a_request_of_this_machine_is_of_no_proxy_and_of_no_other_site_s_page() -> None:
    def is_from_here(client: str | None, headers: dict[str, str]) -> bool:
        sent = {"host": "localhost:8000"} | headers
        raw = [(name.encode(), value.encode()) for name, value in sent.items()]
        scope = {"type": "http", "path": "/", "client": client and (client, 4000), "headers": raw}
        return _is_from_here(scope)

    for address in LOCAL:
        assert all(is_from_here(address, headers) for headers in OF_OWN_PAGE)
        assert not any(is_from_here(address, headers) for headers in OF_PROXIES + OF_OTHER_SITES)
        assert is_from_here(address, {"host": "[::1]:8000"})
        rebound = {"host": "evil.example:8000", "sec-fetch-site": "same-origin"}
        assert not is_from_here(address, rebound)
    for elsewhere in (None, "192.0.2.7", "localhost.example"):
        assert not is_from_here(elsewhere, {})


def access_of(tenants: Tenants) -> Access:
    """What no request passes: nothing stands behind it."""
    nothing: Any = None
    return Access(nothing, Catalogue({}, RULE_SETS), tenants, refuse=nothing, max_requests=10)


def test_a_path_in_front_of_the_server_hides_no_admin_s_path() -> None:
    access = access_of(shop_and_bank())
    scope = {"type": "http", "headers": [(b"x-api-key", b"shop's key")], "root_path": "/guard"}
    for path in ("/guard/admin/rules/fine", "/guard/metrics"):
        with pytest.raises(HTTPException) as refused:
            access._caller(scope | {"path": path})
        assert refused.value.status_code == 403


def test_without_tenants_rules_are_changed_from_here(engine: ToyEngine, serve: Serve) -> None:
    client = serve(engine)
    # uvicorn takes the word of a proxy on this machine for who sent a request.
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    for method in ("POST", "DELETE", "HEAD", "OPTIONS"):
        refused = client.request(method, "/admin/rules/flagged", headers=elsewhere)
        assert refused.status_code == 403
        assert method == "HEAD" or "TENANTS" in refused.json()["error"]
    assert client.get("/v1/rules", headers=elsewhere).status_code == 200
    assert engine.replaced == []
    assert client.delete("/admin/rules/flagged").status_code == 200


def test_a_conversation_that_is_asked_several_times_counts_once_and_equal_texts_each(
    client: Client,
) -> None:
    caller = Caller(Catalogue({}, {}), Tenant("bank", (), TenantLimits(characters=100)))
    turns = [Message("user", "a" * 40), Message("assistant", "b" * 40)]
    caller.check_size([turns[:1], turns, (*turns, Message("user", "d" * 20))])
    replies = [Message("assistant", letter * 20) for letter in "cde"]
    caller.check_size([(*turns[:1], reply) for reply in replies])
    with pytest.raises(HTTPException, match="120 characters"):
        caller.check_size([[Message("user", "a" * 40)] for _ in range(3)])
    messages = [{"role": "user", "content": f"turn {number}....."} for number in range(9)]
    answer = ask(client, "bank", messages=messages, rule_set="strict", explain=True).json()
    assert "flagged" in answer["explanations"]  # which asks for each turn of the conversation


def test_a_tenant_without_a_limit_leaves_room_for_others_where_there_are_any() -> None:
    lone = Tenants((BANK,), KeyRing({}))
    for owners, most in ((lone, 10), (shop_and_bank(), 5)):
        access = access_of(owners)
        bank = access._callers["bank"]
        bank.under_way = {"request": most, "stream": 0}
        assert (bank.reached_limit("request"), bank.reached_limit("stream")) == (most, None)
        bank.under_way["request"] -= 1
        assert bank.reached_limit("request") is None
        assert asyncio.run(places_in_the_engine(bank)) == most  # for the checks of one request
    shop = access._callers["shop"]
    shop.under_way["stream"] = 1  # its own limit is of both together
    assert (shop.reached_limit("request"), shop.reached_limit("stream")) == (1, 1)


async def places_in_the_engine(caller: Caller) -> int:
    places = 0
    room: Any = caller.room
    while not room.locked():
        await room.acquire()
        places += 1
    return places


CATALOGUE = Catalogue(
    cards={"pii_leak": "card", "toxicity": "card"},  # type: ignore[dict-item]
    rule_sets={"safety": RuleSet.any_of(["toxicity"])},
)


def test_rules_are_asked_by_name_or_all_and_a_rule_set_by_its_own() -> None:
    assert CATALOGUE.selected(["toxicity", "toxicity"]).rules == ("toxicity",)
    assert CATALOGUE.selected(None).rules == ("pii_leak", "toxicity")
    assert CATALOGUE.selected(None, "safety") is CATALOGUE.rule_sets["safety"]
    with pytest.raises(HTTPException, match="not both"):
        CATALOGUE.selected(["toxicity"], "safety")


def test_the_nearest_of_what_may_be_asked_is_named_and_nothing_else_of_it() -> None:
    """Of a caller who may ask for some rules, the others' names stay unknown."""
    for rules, rule_set, nearest in ((["pii_leek"], None, "pii_leak"), (None, "safty", "safety")):
        with pytest.raises(HTTPException, match=f"Did you mean '{nearest}'") as unknown:
            CATALOGUE.selected(rules, rule_set)
        assert unknown.value.status_code == 404
    limited = CATALOGUE.limited_to(["safety"])
    for catalogue, name in ((CATALOGUE, "pii_leak" * 20), (limited, "pii_leek")):
        with pytest.raises(HTTPException, match=r"not served: \w*; GET /v1/rules lists them"):
            catalogue.selected([name])
