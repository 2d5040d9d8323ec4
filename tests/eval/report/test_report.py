from __future__ import annotations

import json
from pathlib import Path

from eval.judge.answer import JudgeRecord
from eval.report.report import Report, notes, write_report
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
    assert not {"right", "groups"} & set(medical)


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
    methods = json.loads(report.as_json())["mean"]["methods"]
    assert list(methods) == ["bag_of_words", "lora", "alora"]


def test_rules_with_the_same_note_share_it(world: World) -> None:
    medical = evaluated(world)
    legal = medical.model_copy(update={"rule": "legal"})
    lines = notes([legal, medical], ["tax: no data"])
    assert "- legal, medical: judged by base through the served engine." in lines
    assert "- legal, medical: bag of words of last turn, words 1-2, C = 1." in lines
    assert lines[-1] == "- Left out: tax: no data"


def test_a_judge_s_note_says_what_it_took_and_what_it_did_not_answer(world: World) -> None:
    took = {"refused": 1, "cost_usd": 0.5, "without_usage": 2}
    judge = JudgeRecord(name="gpt-toy", endpoint="http://x", **took)
    judged = evaluated(world).model_copy(update={"judges": {"judge": judge}})
    (line,) = [line for line in notes([judged], []) if "gpt-toy" in line]
    assert line == (
        "- medical: judged by gpt-toy at http://x; cost 0.5000 USD; tokens and cost unknown for 2 "
        "answers; 1 of 8 conversations refused by the endpoint, counted as wrong."
    )
