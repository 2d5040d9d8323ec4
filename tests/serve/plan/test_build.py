"""A whole plan, on coefficients that are written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.plan.build import build, judge_prices, per_million_checks
from serve.plan.plan_file import JudgePricing
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


def test_copies_and_reads_of_adapters_without_a_slot_are_told(tmp_path: Path) -> None:
    calibrated(tmp_path)
    few = build(plan(traffic=SEVERAL, slots=10, p95_ms=10_000.0, checks=100), tmp_path)
    replica = few.section("one replica")
    assert replica.value("aLoRA", "swap-ins") > 1 and replica.value("aLoRA", "reads") == 0


def test_devices_cost_by_the_hour() -> None:
    # 3 devices at 2 USD answer 50 checks a second: 180,000 an hour for 6 USD.
    assert per_million_checks(2.0, 3, 50.0) == pytest.approx(6 / 180_000 * 1e6)


def test_a_judge_costs_by_the_token() -> None:
    judge = JudgePricing(
        input=0.4,
        cached_input=0.1,
        output=1.6,
        policy_tokens=150,
        scaffold_tokens=50,
        output_tokens=5,
    )
    prices = judge_prices(judge, tokens=1000, rules=10)
    # A million checks: each token at a price a million costs that price.
    answers = 10 * 5 * 1.6
    cached = 1050 * 0.4 + 9 * 1050 * 0.1 + 10 * 150 * 0.4
    expected = [10 * 1200 * 0.4, cached, (1050 + 1500) * 0.4]
    assert list(prices.values()) == pytest.approx([usd + answers for usd in expected])
    assert len(judge_prices(judge.model_copy(update={"cached_input": None}), 100, 2)) == 2


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
