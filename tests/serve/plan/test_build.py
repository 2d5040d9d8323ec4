"""A whole plan, on coefficients that are written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.plan.build import build
from serve.plan.report import table
from tests.serve.plan.deployments import calibrated, plan

JUDGE = {"input": 0.4, "cached_input": 0.1, "output": 1.6, "policy_tokens": 100}
SEVERAL = {"rate": 20.0, "lengths": [100, 300], "rules_a_check": [4, 8], "rules": 20}


def test_a_plan_is_priced_by_the_replicas_that_its_rate_needs(tmp_path: Path) -> None:
    calibrated(tmp_path)
    report = build(plan(), tmp_path)
    replica, cost = report.section("one replica"), report.section("cost")
    rate = replica.value("aLoRA", "within target")
    assert rate < replica.value("aLoRA", "saturates at") == pytest.approx(10, rel=0.01)
    replicas = cost.value("aLoRA", "replicas")
    assert replicas - 1 < 20 / rate <= replicas
    # 3.6 USD an hour: a thousandth a second, for 20 checks of one rule.
    assert cost.value("aLoRA", "a million checks") == pytest.approx(replicas * 1000 / 20)
    assert cost.value("aLoRA", "a million verdicts") == cost.value("aLoRA", "a million checks")
    assert cost.value("aLoRA", "checks, always full") == pytest.approx(100, rel=0.01)


def test_loras_cost_a_prefill_a_rule_and_a_judge_its_tokens(tmp_path: Path) -> None:
    calibrated(tmp_path)
    report = build(plan(traffic=SEVERAL, judge=JUDGE, p95_ms=10_000.0), tmp_path)
    replica, cost = report.section("one replica"), report.section("cost")
    ratio = replica.value("aLoRA", "saturates at") / replica.value("LoRA", "saturates at")
    assert 4 < ratio < 8, "six rules, each with a conversation of its own"
    judged = [row.label for row in cost.rows if "price" not in row.figures]
    assert len(judged) == 3
    dear, cached, one = (cost.value(label, "a million checks") for label in judged)
    assert dear > cached > one
    assert dear == pytest.approx(6 * ((60 + 200 + 100) * 0.4 + 5 * 1.6), rel=0.1)


def test_every_number_says_how_it_is_known_and_only_coefficients_are_measured(
    tmp_path: Path,
) -> None:
    calibrated(tmp_path)
    report = build(plan(traffic=SEVERAL), tmp_path)
    for section in report.sections:
        for row in section.rows:
            for column, figure in row.figures.items():
                assert figure.basis in ("measured here", "computed", "given")
                if figure.basis == "measured here":
                    assert section.title == "coefficients", column
    assert "ms" in table(report)


def test_a_time_for_an_adapter_that_is_not_told_from_zero_is_named(tmp_path: Path) -> None:
    path = calibrated(tmp_path)
    assert "Not told from 0" not in build(plan(), tmp_path).section("coefficients").note
    content = json.loads(path.read_text(encoding="utf-8"))
    content["methods"]["alora"] |= {"load_ms": 0.0, "load_error_ms": 0.4}
    path.write_text(json.dumps(content), encoding="utf-8")
    note = build(plan(), tmp_path).section("coefficients").note
    assert note.endswith("standard error, aLoRA: disk: 0.00 ms, standard error 0.40.")


def test_a_target_that_nothing_keeps_has_no_price(tmp_path: Path) -> None:
    calibrated(tmp_path)
    cost = build(plan(p95_ms=50.0), tmp_path).section("cost")
    assert "replicas" not in cost.rows[0].figures and "checks, always full" in cost.rows[0].figures


def test_shards_are_compared_where_not_every_rule_has_a_slot(tmp_path: Path) -> None:
    calibrated(tmp_path)
    titles = [section.title for section in build(plan(traffic=SEVERAL), tmp_path).sections]
    assert "shards" not in titles
    few = build(plan(traffic=SEVERAL, slots=10, methods=["alora"], checks=100), tmp_path)
    assert few.section("shards").value("aLoRA, sharded", "devices") == 2


def test_a_trace_brings_its_own_rate_and_rules(tmp_path: Path) -> None:
    calibrated(tmp_path)
    path = tmp_path / "trace.jsonl"
    lines = []
    for number in range(200):
        check = {"time": 0.5 * number, "tokens": 97, "rules": [f"rule_{number % 3}"]}
        lines.append(json.dumps(check))
    path.write_text("\n".join(lines), encoding="utf-8")
    report = build(plan(traffic={"trace": str(path)}), tmp_path)
    assert report.rate == pytest.approx(2.0, rel=0.01)
    # Evenly spaced, so there is no queue: one replica of ten a second.
    assert report.section("cost").value("aLoRA", "replicas") == 1
    assert report.section("one replica").value("aLoRA", "p95") == pytest.approx(100, rel=0.02)
