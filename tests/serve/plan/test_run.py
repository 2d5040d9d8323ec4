"""A whole plan, on coefficients that are written down; its table."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch

from guard.home import ROOT
from guard.recipe import load_recipe
from serve.plan.calibration import load_calibration
from serve.plan.plan_file import load_plan
from serve.plan.run import PlanReport, build, main
from tests.serve.plan.on_paper import calibrated, plan

FIGURES = ROOT / "docs" / "benchmarks" / "serving"
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


def test_groups_of_rules_have_replicas_of_their_own(tmp_path: Path) -> None:
    calibrated(tmp_path)
    whole = {"rate": 15.0, "lengths": [97, 97], "rules_a_check": [1, 1], "rules": 12}
    # Of three groups each gets 5 of the 10 checks a second that a replica can answer.
    grouped = build(plan(traffic=whole | {"groups": 3}, slots=4, p95_ms=900.0), tmp_path).figures[
        "aLoRA"
    ]
    assert grouped["replicas"] == 3 and grouped["swap-ins, a check"] == 0
    assert grouped["utilisation, %"] == pytest.approx(50, rel=0.01)
    assert grouped["1M checks, USD"] == pytest.approx(3 * 1000 / 15)
    everywhere = build(plan(traffic=whole, slots=4), tmp_path).figures["aLoRA"]
    assert everywhere["swap-ins, a check"] > 0


def test_what_is_computed_of_an_h100_follows_from_the_cells_that_were_measured() -> None:
    measured = json.loads((FIGURES / "gpu_h100_4b_shape.json").read_text(encoding="utf-8"))
    cells = measured["cells"]

    def median(cell: Any, quantity: str) -> float:
        return float(cell["alora"][quantity]["median"])

    smallest, largest = cells[0], cells[-1]
    a_token = median(largest, "engine_ms") / largest["needed_tokens"]
    a_step = median(smallest, "engine_ms") - a_token * smallest["needed_tokens"]
    shorter, longer = [cell for cell in cells if cell["rules"] == 24]
    outside = [median(cell, "wall_ms") - median(cell, "engine_ms") for cell in (shorter, longer)]
    tokens = longer["conversation_tokens"] - shorter["conversation_tokens"]
    submit_token = (outside[1] - outside[0]) / tokens
    submit_rule = (outside[0] - submit_token * shorter["conversation_tokens"]) / 24
    computed = load_calibration(FIGURES / "calibration_h100_4b_computed.json")
    for cost in computed.methods.values():
        assert (cost.step["steps"], cost.step["tokens"]) == pytest.approx((a_step, a_token), 1e-3)
        submit = cost.submit["conversation_tokens"], cost.submit["rules"]
        assert submit == pytest.approx((submit_token, submit_rule), rel=1e-3)
    for cell in cells:  # no step is planned faster than it was
        planned = a_step + a_token * cell["needed_tokens"]
        assert 0.999 <= planned / median(cell, "engine_ms") < 1.4


def test_the_deployment_of_10000_rules_says_what_the_pages_say_and_that_it_is_computed(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    shape = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}
    shape |= {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    recipe = load_recipe("qwen3-4b").model_copy(update={"base": str(tmp_path)})
    monkeypatch.setattr("serve.plan.replica.load_recipe", lambda _: recipe)
    report = build(load_plan("h100_10k"), tmp_path)
    assert "COMPUTED from cells measured at" in report.text
    alora, lora, judge = report.figures.values()
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert f"| H100s | {alora['replicas']:.0f} | {lora['replicas']:.0f} | |" in page
    assert f"| p95, ms | {alora['p95, ms']:.0f} | {lora['p95, ms']:.0f} | |" in page
    prices = [figures["1M checks, USD"] for figures in (alora, lora, judge)]
    assert "| USD, a million checks | {:.0f} | {:.0f} | {:,.0f} |".format(*prices) in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"beyond {int(alora['within target, checks/s'])} checks/s" in " ".join(readme.split())
