"""A rule on a small random GLiNER2 by the commands' own functions: trained, evaluated, served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from eval.run import run as evaluate
from guard.conversation.example import read_examples
from guard.layout import Runs
from guard.method import PEFT_WEIGHTS
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.weights.card import load_card
from serve.engine import GuardEngine
from serve.engine.adapter import trained
from tests.gliner2_toy import adapted, gliner2_recipe, reference_logit, save_base
from tests.train.conftest import RULE, write_toy_data
from train.run import run as train

pytestmark = pytest.mark.slow


def test_a_rule_is_trained_evaluated_and_served_as_on_any_other_base(tmp_path: Path) -> None:
    recipe, runs = gliner2_recipe(save_base(tmp_path / "base")), Runs(tmp_path / "runs")
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(RULE.model_dump(mode="json")))
    write_toy_data(runs.data("toy"), n_other=16)

    train("toy", recipe, runs=runs, rules=tmp_path)
    folder = runs.adapter("toy", "toy", "lora")
    card = load_card(folder)
    assert card.rule_text == RULE.title and (folder / PEFT_WEIGHTS).is_file()

    evaluate("toy", [recipe], runs=runs, rules=tmp_path)
    report = json.loads(runs.report.read_text())["rules"]["toy"]
    assert report["refusals"] == {"judge": 0, "lora": 0}
    assert report["agreement"]["lora"]["prompts"] == 16
    assert report["agreement"]["lora"]["max_difference"] < 1e-5
    assert report["methods"]["lora"]["answered"] == 16

    builder, model = Gliner2PromptBuilder.of(recipe), adapted(folder)
    messages = read_examples(runs.data("toy") / "test.jsonl")[0].messages
    expected = reference_logit(model, builder, messages, card.rule_text)
    with GuardEngine(recipe, trained(runs, "toy", "lora")) as engine:
        (verdict,) = engine.check(messages).verdicts
    assert verdict.p_violation == pytest.approx(
        card.calibration.verdict("toy", expected).p_violation, abs=1e-5
    )
