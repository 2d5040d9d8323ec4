"""Prometheus's metrics: what they count, and that the board of Grafana asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from httpx import Client
from prometheus_client.parser import text_string_to_metric_families

from serve.engine.score import EngineCounters
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import LOGITS, RULE_SETS, ToyEngine

BOARD = Path(__file__).parents[4] / "setup" / "grafana" / "centurion.json"
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: str) -> Samples:
    """(name, values of its labels in the order of their names) -> value."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found[sample.name, labels] = sample.value
    return found


def scraped(client: Client) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return samples(response.text)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(LOGITS)


@pytest.fixture
def client(engine: ToyEngine, serve: Serve) -> Client:
    return serve(engine, rule_sets=RULE_SETS)


def test_checks_verdicts_and_tokens_are_counted(client: Client) -> None:
    before = scraped(client)
    assert before["guard_verdicts_total", ("fine", "allow")] == 0  # they exist before they count
    client.post("/v1/check", json={"messages": MESSAGES})
    client.post("/v1/check", json={"messages": MESSAGES, "rule_set": "both"})
    unjudged = [{"role": "user", "content": "cannot be judged"}]
    client.post("/v1/check", json={"messages": unjudged, "rules": ["fine"]})
    after = scraped(client)
    counted = {
        ("guard_verdicts_total", ("flagged", "violation")): 2,
        ("guard_verdicts_total", ("fine", "allow")): 2,
        ("guard_verdicts_total", ("fine", "unjudged")): 1,
        ("guard_uncertain_verdicts_total", ("flagged",)): 2,  # 0.27, in [0.2, 0.3]
        ("guard_checks_total", ("", "", "violation")): 1,
        ("guard_checks_total", ("both", "", "allow")): 1,
        ("guard_checks_total", ("", "", "unjudged")): 1,
        ("guard_tokens_total", ("cached",)): 4 * 3,
        ("guard_tokens_total", ("computed",)): 4 * 2,
        ("guard_check_seconds_count", ("both",)): 1,
        ("guard_request_seconds_count", ("check", "200")): 3,
    }
    assert {key: after[key] for key in counted} == counted
    assert 0 < after["guard_check_seconds_sum", ("both",)] < 60


def test_what_has_no_answer_is_counted_by_its_reason(serve: Serve) -> None:
    client = serve(ToyEngine())
    client.post("/v1/check", json={"messages": MESSAGES, "rules": ["crash"]})
    client.post("/v1/check", json={"messages": MESSAGES, "rules": ["nobody"]})
    client.post("/nowhere", json={})
    after = scraped(client)
    assert after["guard_check_failures_total", ("engine_failed",)] == 1
    assert after["guard_check_failures_total", ("overloaded",)] == 0
    for wire_format, status in (("check", "503"), ("check", "422"), ("none", "404")):
        assert after["guard_request_seconds_count", (wire_format, status)] == 1
    assert after["guard_verdicts_total", ("crash", "unjudged")] == 0


def test_what_the_engine_says_of_itself_is_new(client: Client, engine: ToyEngine) -> None:
    engine.counters = EngineCounters(
        adapters=2,
        adapter_loads=5,
        swap_ins=7,
        scheduled_tokens=900,
        forward_passes=12,
        cache_tokens=4096,
        step_s=1.5,
    )
    client.post("/v1/check", json={"messages": MESSAGES})
    after = scraped(client)
    while after["guard_adapters", ()] != 2 or after["guard_checks_open", ()]:
        after = scraped(client)  # the thread reads them after the answer
    said = {
        "guard_adapter_loads_total": 5,
        "guard_adapter_swap_ins_total": 7,
        "guard_engine_tokens_total": 900,
        "guard_engine_forward_passes_total": 12,
        "guard_engine_step_seconds_total": 1.5,
        "guard_cache_capacity_tokens": 4096,
        "guard_ready": 1,
        "guard_checks_waiting": 0,
    }
    assert {name: after[name, ()] for name in said} == said
    assert after["guard_rule_info", ("fine", "0123456789abcdef")] == 1
    engine.is_usable = False
    assert scraped(client)["guard_ready", ()] == 0


def test_no_label_is_a_caller_s_word(client: Client) -> None:
    client.post("/v1/check", json={"messages": MESSAGES, "rule_set": "made up"})
    client.post("/made-up", json={})
    client.post("/v1/check", json={"messages": MESSAGES}, headers={"x-request-id": "made.up"})
    assert not re.search("made.up", client.get("/metrics").text)


def test_openmetrics_is_spoken_where_it_is_asked_for(client: Client) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = client.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def used_metrics(board: str) -> set[str]:
    """The metrics that the expressions of a board name."""
    names: set[str] = set()
    for panel in json.loads(board)["panels"]:
        for target in panel["targets"]:
            expression = re.sub(r'"[^"]*"|by \([^)]*\)', "", target["expr"])
            names |= set(re.findall(r"\b(?:guard|process)_[a-z0-9_]+", expression))
    return names


def test_every_metric_of_the_board_exists(client: Client) -> None:
    client.post("/v1/check", json={"messages": MESSAGES})
    exposed = {name for name, _ in scraped(client)}
    used = used_metrics(BOARD.read_text(encoding="utf-8"))
    assert used - exposed == set()
    unseen = {name for name in exposed if name.startswith("guard_")} - used
    # Parts of histograms, the times of counters, and what only alerts need.
    assert {name for name in unseen if not re.search("_(sum|count|created|bucket)$", name)} == {
        "guard_rules_served",
        "guard_engine_restarts_total",
        "guard_cache_capacity_tokens",
    }
