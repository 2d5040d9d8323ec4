"""Each rule's outcome and time in a header, on request."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from guard.verdict import Verdict
from serve.api.app import create_app
from serve.api.observe.timing import MAX_CHARACTERS, server_timing
from serve.engine import Check, Refusal
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine

ASKING = {"guard-timing": "1"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = ToyEngine({"fine": -2.0, "flagged": -1.0})
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        yield client


def test_a_check_s_rules_are_entries_whatever_the_format(client: httpx.Client) -> None:
    asked = [("/v1/check", {"messages": MESSAGES}), ("/v1/moderations", {"input": ["a", "b"]})]
    for checks, (path, body) in enumerate(asked, start=1):
        header = client.post(path, json=body, headers=ASKING).headers["server-timing"]
        entries = header.split(", ")
        assert len(entries) == 2 * checks
        assert re.fullmatch(r"fine;dur=\d+\.\d;desc=allow", entries[0])
        assert re.fullmatch(r"flagged;dur=\d+\.\d;desc=violation", entries[1])


def test_checks_that_are_nobody_s_answer_are_no_entries(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "explain": True}
    explained = client.post("/v1/check", json=body, headers=ASKING)
    assert explained.json()["explanations"].keys() == {"flagged"}
    assert explained.headers["server-timing"].count("desc=") == 2
    turns = client.post("/v1/check/turns", json={"messages": MESSAGES, "since": 2}, headers=ASKING)
    assert turns.json()["judged_alone"].keys() == {"flagged"}
    assert turns.headers["server-timing"].count("desc=") == 2


def test_nobody_gets_it_unasked_or_without_a_check(client: httpx.Client) -> None:
    assert "server-timing" not in client.post("/v1/check", json={"messages": MESSAGES}).headers
    assert "server-timing" not in client.get("/v1/rules", headers=ASKING).headers
    assert "server-timing" not in client.post("/v1/check", json={}, headers=ASKING).headers


def test_a_rule_without_a_verdict_is_unjudged_and_has_no_duration() -> None:
    verdict = Verdict("a", 1.0, 0.7, 0.5)
    refused = {"b": Refusal("b", "it does not fit", "too_long")}
    check = Check((verdict,), refused, 0, 0, 0.0, latencies_ms={"a": 1.26})
    assert server_timing([check]) == "a;dur=1.3;desc=violation, b;desc=unjudged"


def test_a_header_that_a_proxy_would_refuse_is_cut() -> None:
    refused = {f"rule_{number}": Refusal("", "", "too_long") for number in range(1000)}
    header = server_timing([Check((), refused, 0, 0, 0.0)])
    assert len(header) < MAX_CHARACTERS + 10 and header.endswith("desc=unjudged, cut")
