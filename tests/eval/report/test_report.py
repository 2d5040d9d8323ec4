from __future__ import annotations

import json

from eval.judge.answer import JudgeRecord
from eval.report.report import Report, notes
from tests.eval.conftest import World
from tests.eval.test_evaluation import evaluated


def test_the_mean_over_rules_is_of_every_contender_and_difference(world: World) -> None:
    """Metrics lie beside the accuracy; what every example got stays out."""
    medical = evaluated(world)
    report = Report((medical.model_copy(update={"rule": "legal"}), medical))
    content = json.loads(report.as_json())
    mean, of_medical = content["mean"], content["rules"]["medical"]
    assert mean["methods"]["lora"]["accuracy"] == medical.methods["lora"].accuracy
    assert mean["methods"]["lora"]["auroc"] == medical.methods["lora"].metrics["auroc"]
    assert mean["differences"]["alora_minus_lora"]["accuracy"] == -1 / 8
    assert "aLoRA - LoRA: -12.5 points of mean accuracy, 95 % [" in report.as_markdown()
    lora = of_medical["methods"]["lora"]
    assert {"accuracy", "f1", "auroc", "ece", "twins"} <= set(lora)
    assert {"accuracy", "auroc"} <= set(lora["seeds"]["0"]) & set(lora["strata"]["seen"])
    assert not {"right", "groups"} & set(of_medical)


def test_a_judge_behind_an_endpoint_says_what_it_took(world: World) -> None:
    took = {"refused": 1, "cost_usd": 0.5, "without_usage": 2}
    judge = JudgeRecord(name="gpt-toy", endpoint="http://x", **took)
    toy = evaluated(world).model_copy(update={"judges": {"judge": judge}})
    (line,) = [line for line in notes([toy], []) if "gpt-toy" in line]
    assert line == (
        "- medical: judged by gpt-toy at http://x; cost 0.5000 USD; tokens and cost unknown for 2 "
        "answers; 1 of 8 conversations refused by the endpoint, counted as wrong."
    )
