"""A whole plan, on coefficients that are written down; its table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch

from serve.plan.run import PlanReport, build, main
from tests.serve.plan.on_paper import calibrated, plan

SEVERAL = {"rate": 20.0, "lengths": [100, 300], "rules_a_check": [4, 8], "rules": 20}


def test_a_plan_is_priced_by_the_replicas_that_its_rate_needs(tmp_path: Path) -> None:
    calibrated(tmp_path)
    values = build(plan(judge_price=2.0), tmp_path).figures
    alora, judge = values["aLoRA"], values["LLM, a call a rule"]
    replicas = alora["replicas"]
    assert alora["within target, checks/s"] < alora["saturates at, checks/s"]
    assert replicas - 1 < 20 / alora["within target, checks/s"] <= replicas
    assert alora["utilisation, %"] == pytest.approx(100 * 20 / replicas / 10, rel=0.01)
    # 3.6 USD an hour: a thousandth a second, for 20 checks of one rule.
    assert alora["1M checks, USD"] == pytest.approx(replicas * 1000 / 20)
    assert alora["1M verdicts, USD"] == alora["1M checks, USD"]
    assert alora["1M checks, always full, USD"] == pytest.approx(100, rel=0.01)
    assert judge["1M verdicts, USD"] == pytest.approx(2 * 97)
    too_strict = build(plan(p95_ms=50.0), tmp_path).figures["aLoRA"]
    assert "replicas" not in too_strict and "1M checks, always full, USD" in too_strict


def test_loras_cost_a_prefill_a_rule(tmp_path: Path) -> None:
    calibrated(tmp_path)
    values = build(plan(traffic=SEVERAL, p95_ms=10_000.0), tmp_path).figures
    alora, lora = (values[label]["saturates at, checks/s"] for label in ("aLoRA", "LoRA"))
    assert 4 < alora / lora < 8, "six rules, each with a conversation of its own"


def test_a_plan_is_printed_and_kept(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    calibrated(tmp_path)
    small = {"name": "small", "p95_ms": 900, "price_an_hour": 0.1}
    small |= {"traffic": {"rate": 5.0, "rules_a_check": [1, 2], "rules": 3}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    named = ["--runs", str(tmp_path), "--plan", str(tmp_path / "small.yaml")]
    monkeypatch.setattr(sys, "argv", ["run", *named])
    main()
    printed = capsys.readouterr().out
    for line in (r"weights, GiB +0\.0293 +0\.0293", r"replicas +\d+"):
        assert re.search(rf"^{line} *", printed, re.MULTILINE), line
    assert "commit c0ffee" in printed and str(tmp_path / "plan.json") in printed
    kept = (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert PlanReport.model_validate_json(kept).plan.name == "small"
