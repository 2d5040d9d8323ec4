from __future__ import annotations

import json
from pathlib import Path

from eval.report.report import Report, write_report
from tests.eval.conftest import World
from tests.eval.test_evaluation import evaluated


def test_the_mean_over_rules_is_of_every_contender_and_difference(world: World) -> None:
    medical = evaluated(world)
    report = Report((medical.model_copy(update={"rule": "legal"}), medical))
    mean = json.loads(report.as_json())["mean"]
    assert mean["methods"]["lora"]["accuracy"] == medical.methods["lora"].accuracy
    assert mean["methods"]["lora"]["auroc"] == medical.methods["lora"].metrics["auroc"]
    assert mean["differences"]["alora_minus_lora"]["accuracy"] == -1 / 8
    assert "aLoRA - LoRA: -12.5 points of mean accuracy, 95 % [" in report.as_markdown()


def test_metrics_lie_beside_the_accuracy_and_examples_stay_out_of_the_json(world: World) -> None:
    medical = json.loads(Report((evaluated(world),)).as_json())["rules"]["medical"]
    lora = medical["methods"]["lora"]
    assert {"accuracy", "f1", "auroc", "ece"} <= set(lora)
    assert {"accuracy", "auroc"} <= set(lora["seeds"]["0"]) & set(lora["strata"]["seen"])
    assert "right" not in medical and "groups" not in medical


def test_a_report_that_says_the_same_is_not_written_again(world: World, tmp_path: Path) -> None:
    report = Report((evaluated(world),))
    write_report(report, tmp_path / "report.json")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("report.*")}
    assert {path.suffix for path in written} == {".json", ".md"}
    write_report(report, tmp_path / "report.json")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("report.*")} == written


def test_where_nobody_judges_the_report_has_no_judge_and_says_so(world: World) -> None:
    judged = evaluated(world)
    methods = {name: quality for name, quality in judged.methods.items() if name != "judge"}
    report = Report((judged.model_copy(update={"judges": {}, "methods": methods}),))
    assert "medical: without a judge" in report.as_markdown()
    assert list(json.loads(report.as_json())["mean"]["methods"]) == [
        "bag_of_words",
        "lora",
        "alora",
    ]
