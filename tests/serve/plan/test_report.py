"""A whole plan, on coefficients that are written down; its tables and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.plan.plan_file import JudgePricing
from serve.plan.report import (
    Figure,
    PlanReport,
    Section,
    build,
    judge_prices,
)
from tests.serve.plan.on_paper import calibrated, plan

JUDGE = {"input": 0.4, "cached_input": 0.1, "output": 1.6, "policy_tokens": 100}
SEVERAL = {"rate": 20.0, "lengths": [100, 300], "rules_a_check": [4, 8], "rules": 20}


def report() -> PlanReport:
    given = Figure(value=3, unit="USD an hour", basis="given", source="a list")
    usd = Figure(value=85.4, unit="USD", basis="computed", source="simulated")
    rows = {
        "aLoRA": {"price": given, "a million checks": usd},
        "LoRA": {"price": given},
        "a judge": {"a million checks": usd},
    }
    sections = (Section(title="cost", rows=rows, note="A note."),)
    origin = {"name": "small", "commit": "c0ffee", "hardware": "a core", "source": "a file"}
    return PlanReport(**origin, model="tiny", rate=10, p95_target_ms=100, sections=sections)


def value(report: PlanReport, title: str, label: str, column: str) -> float:
    return report.rows(title)[label][column].value


def test_the_table_has_a_line_a_figure_and_a_mark_at_every_number() -> None:
    heads, price, usd, note = report().sections[0].text.splitlines()
    assert heads.split() == ["cost", "aLoRA", "LoRA", "a", "judge"]
    assert price.split() == ["price,", "USD", "an", "hour", "3", "g", "3", "g"]
    assert usd.split() == ["a", "million", "checks,", "USD", "85.4", "c", "85.4", "c"]
    assert note == "A note."
    assert "m measured here, c computed, g given" in report().text


def test_a_number_is_shown_with_three_digits() -> None:
    texts = []
    for number in (0.01234, 1.234, 12.34, 99.96, 1234.5, -1234.5, 40.0):
        texts.append(Figure(value=number, unit="", basis="given").text.removesuffix(" g"))
    assert texts == ["0.0123", "1.23", "12.3", "100", "1,234", "-1,234", "40"]


def test_a_plan_is_priced_by_the_replicas_that_its_rate_needs(tmp_path: Path) -> None:
    calibrated(tmp_path)
    built = build(plan(), tmp_path)
    rate = value(built, "one replica", "aLoRA", "within target")
    assert (
        rate < value(built, "one replica", "aLoRA", "saturates at") == pytest.approx(10, rel=0.01)
    )
    replicas = value(built, "cost", "aLoRA", "replicas")
    assert replicas - 1 < 20 / rate <= replicas
    # 3.6 USD an hour: a thousandth a second, for 20 checks of one rule.
    assert value(built, "cost", "aLoRA", "a million checks") == pytest.approx(replicas * 1000 / 20)
    assert value(built, "cost", "aLoRA", "a million verdicts") == value(
        built, "cost", "aLoRA", "a million checks"
    )
    assert value(built, "cost", "aLoRA", "checks, always full") == pytest.approx(100, rel=0.01)


def test_loras_cost_a_prefill_a_rule_and_a_judge_its_tokens(tmp_path: Path) -> None:
    calibrated(tmp_path)
    built = build(plan(traffic=SEVERAL, judge=JUDGE, p95_ms=10_000.0), tmp_path)
    ratio = value(built, "one replica", "aLoRA", "saturates at") / value(
        built, "one replica", "LoRA", "saturates at"
    )
    assert 4 < ratio < 8, "six rules, each with a conversation of its own"
    few_slots = build(plan(traffic=SEVERAL, slots=10, p95_ms=10_000.0, checks=100), tmp_path)
    assert value(few_slots, "one replica", "aLoRA", "swap-ins") > 1
    assert value(few_slots, "one replica", "aLoRA", "reads") == 0
    judged = [label for label, row in built.rows("cost").items() if "price" not in row]
    assert len(judged) == 3
    dear, cached, one = (value(built, "cost", label, "a million checks") for label in judged)
    assert dear > cached > one
    assert dear == pytest.approx(6 * ((60 + 200 + 100) * 0.4 + 5 * 1.6), rel=0.1)


def test_every_number_says_how_it_is_known_and_only_coefficients_are_measured(
    tmp_path: Path,
) -> None:
    calibrated(tmp_path)
    built = build(plan(traffic=SEVERAL), tmp_path)
    for section in built.sections:
        for figures in section.rows.values():
            for column, figure in figures.items():
                assert figure.basis in ("measured here", "computed", "given") and figure.source
                if figure.basis == "measured here":
                    assert section.title == "coefficients", column
    path = tmp_path / "new" / "plan.json"
    built.save(path)
    assert PlanReport.model_validate_json(path.read_text(encoding="utf-8")) == built
    too_strict = build(plan(p95_ms=50.0), tmp_path).rows("cost")["aLoRA"]  # nothing keeps that
    assert "replicas" not in too_strict and "checks, always full" in too_strict


def test_a_judge_costs_by_the_token() -> None:
    judge = JudgePricing(**JUDGE, scaffold_tokens=50, output_tokens=5)
    prices = judge_prices(judge, tokens=1000, rules=10)
    # A million checks: each token at a price a million costs that price.
    answers = 10 * 5 * 1.6
    cached = 1050 * 0.4 + 9 * 1050 * 0.1 + 10 * 100 * 0.4
    expected = [10 * 1150 * 0.4, cached, (1050 + 1000) * 0.4]
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
    built = build(plan(traffic={"trace": str(path)}), tmp_path)
    assert built.rate == pytest.approx(2.0, rel=0.01)
    # Evenly spaced, so there is no queue: one replica of ten a second.
    assert value(built, "cost", "aLoRA", "replicas") == 1
    assert value(built, "one replica", "aLoRA", "p95") == pytest.approx(100, rel=0.02)
