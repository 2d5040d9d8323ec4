"""A whole plan, on coefficients that are written down; its tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from serve.plan.report import PlanReport, build
from serve.plan.run import main
from tests.serve.plan.on_paper import calibrated, figures, plan

SEVERAL = {"rate": 20.0, "lengths": [100, 300], "rules_a_check": [4, 8], "rules": 20}


def test_a_plan_is_priced_by_the_replicas_that_its_rate_needs(tmp_path: Path) -> None:
    calibrated(tmp_path)
    built = build(plan(), tmp_path)
    replica, cost = (figures(built, title)["aLoRA"] for title in ("one replica", "cost"))
    rate, replicas = replica["within target, checks/s"], cost["replicas"]
    assert rate < replica["saturates at, checks/s"] == pytest.approx(10, rel=0.01)
    assert replicas - 1 < 20 / rate <= replicas
    # 3.6 USD an hour: a thousandth a second, for 20 checks of one rule.
    assert cost["a million checks, USD"] == pytest.approx(replicas * 1000 / 20)
    assert cost["a million verdicts, USD"] == cost["a million checks, USD"]
    assert cost["checks, always full, USD"] == pytest.approx(100, rel=0.01)
    too_strict = figures(build(plan(p95_ms=50.0), tmp_path), "cost")["aLoRA"]
    assert "replicas" not in too_strict and "checks, always full, USD" in too_strict
    with pytest.raises(GuardError, match="State `price_an_hour`"):
        build(plan(price_an_hour=None), tmp_path)


def test_loras_cost_a_prefill_a_rule(tmp_path: Path) -> None:
    calibrated(tmp_path)
    built = build(plan(traffic=SEVERAL, p95_ms=10_000.0), tmp_path)
    replicas = figures(built, "one replica")
    alora, lora = (replicas[label]["saturates at, checks/s"] for label in ("aLoRA", "LoRA"))
    assert 4 < alora / lora < 8, "six rules, each with a conversation of its own"
    few_slots = build(plan(traffic=SEVERAL, slots=10, p95_ms=10_000.0, checks=100), tmp_path)
    replica = figures(few_slots, "one replica")["aLoRA"]
    assert replica["swap-ins, a check"] > 1
    path = tmp_path / "new" / "plan.json"
    built.save(path)
    assert PlanReport.model_validate_json(path.read_text(encoding="utf-8")) == built


def test_a_plan_is_printed_and_kept(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    calibrated(tmp_path)
    small = {"name": "small", "checks": 100, "p95_ms": 900, "price_an_hour": 0.1}
    small |= {"traffic": {"rate": 5.0, "rules_a_check": [1, 2], "rules": 3}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    named = ["--runs", str(tmp_path), "--plan", str(tmp_path / "small.yaml")]
    monkeypatch.setattr(sys, "argv", ["run", *named])
    main()
    printed = capsys.readouterr().out
    for line in (
        r"weights, GiB +0\.0293 +0\.0293",
        r"price, USD an hour +0\.1 +0\.1",
        r"replicas +\d+",  # of LoRA none keeps the target
    ):
        assert re.search(rf"^{line} *$", printed, re.MULTILINE), line
    assert "commit c0ffee" in printed and str(tmp_path / "plan.json") in printed
    assert (tmp_path / "plan.json").is_file()
