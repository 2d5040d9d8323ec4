from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from eval.judge.answer import JudgeRow
from eval.judge.endpoint import AnswersSoFar, EndpointJudge
from eval.report.report import Report
from eval.run import main, run
from guard.conversation.example import SPLITS, Message, read_examples, write_examples
from guard.errors import GuardError
from guard.home import ROOT
from serve.engine import ScoreRequest
from tests.eval.conftest import WITH_HEAD, ToyEngine, World, guess_or_read, words_rows

pytestmark = pytest.mark.slow


def evaluate(
    world: World, selection: str = "all", engine: ToyEngine | None = None, **options: Any
) -> Report:
    engine = engine or ToyEngine(guess_or_read)
    options |= {"runs": world.runs, "rules": world.rules, "open_predictor": engine.open}
    return run(selection, world.recipe, **options)


def report_json(world: World) -> dict[str, Any]:
    return json.loads(world.runs.report.read_text())


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Report]:
    world = World(tmp_path_factory.mktemp("reported"))
    world.add_rule("medical", examples=40, seeds=(0, 1))
    world.add_rule("legal", examples=20, seeds=(0, 1))
    return world, evaluate(world)


def test_the_report_has_the_documented_format(reported: tuple[World, Report]) -> None:
    world, report = reported
    content = report_json(world)
    assert report.as_json() == world.runs.report.read_text()
    assert {"commit", "hardware", "versions", "model", "seeds", "rules", "mean"} <= set(content)
    assert (content["model"], content["seeds"]) == ("toy", [0, 1])
    assert list(content["rules"]) == ["legal", "medical"]
    medical = content["rules"]["medical"]
    assert (medical["n_test"], medical["n_violating"]) == (40, 20)
    assert list(medical["methods"]) == ["judge", "bag_of_words", "lora", "alora"]
    judge, bag, lora, alora = medical["methods"].values()
    # The toy's test rows say nothing of tablets or doctors: the baseline answers alike to all.
    for baseline in (judge, bag):
        assert (baseline["accuracy"], baseline["auroc"], baseline["n"]) == (0.5, 0.5, 40)
        assert set(baseline["strata"]) == {"seen", "unseen"}
    assert alora["accuracy"] == 1.0 and set(alora["seeds"]) == {"0", "1"}
    assert [lora["strata"][name]["n"] for name in ("seen", "unseen")] == [20, 20]
    for quality in (lora, *lora["strata"].values()):
        assert 0 < quality["ece"] < 0.1
    assert lora["strata"]["seen"]["ece"] != lora["strata"]["unseen"]["ece"]
    assert medical["agreement"]["lora"]["prompts"] == 80
    assert medical["refusals"] == {"judge": 0, "lora": 0, "alora": 0}
    assert content["mean"]["methods"]["alora"]["accuracy"] == 1.0
    no_difference = {"accuracy": 0.0, "accuracy_ci95": [0.0, 0.0]}
    assert content["mean"]["differences"] == {"alora_minus_lora": no_difference}


def test_the_table_names_hardware_and_commit(reported: tuple[World, Report]) -> None:
    world, report = reported
    text, content = report.as_markdown(), report_json(world)
    assert text == world.runs.report.with_suffix(".md").read_text()
    assert "| medical (20 of 40) | judge        | 50.0 [35.2, 64.8]" in text
    assert "bag of words | 50.0 [35.2, 64.8]" in text
    assert re.search(r"aLoRA +\| 100.0 ± 0.0 \[91.2, 100.0\].*1.000 \[1.000, 1.000\]", text)
    assert re.search(r"\| medical \| unseen +\| 20 ", text)
    assert f"commit {content['commit']}, {content['hardware']}; " in text
    assert "legal, medical: judged by base model toy, zero-shot through the served engine" in text
    assert "- legal, medical: bag of words of whole conversation, words 1-2, C = 0.1." in text


def test_a_second_run_asks_nothing_unless_it_is_forced(world: World) -> None:
    def written() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in world.runs.root.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    world.add_rule("medical", examples=10)
    evaluate(world)
    before = written()
    engine = ToyEngine(guess_or_read)
    evaluate(world, engine=engine)
    assert engine.opened_with == [] and written() == before
    evaluate(world, engine=engine, force=True)
    assert sum(request.adapter is None for request in engine.requests) == 10


def test_another_judge_outdates_an_evaluation(world: World, monkeypatch: MonkeyPatch) -> None:
    world.add_rule("medical", examples=10)
    world.add_rule("legal", examples=10)
    evaluate(world)
    monkeypatch.setattr(EndpointJudge, "_ask_missing", _answer_yes)
    judge = EndpointJudge("http://nowhere/v1", "gpt-toy", price_in=1.0, price_out=1.0)
    engine = ToyEngine(guess_or_read)
    text = evaluate(world, "legal", engine=engine, judge=judge).as_markdown()
    assert engine.opened_with == []  # the adapters' answers still hold
    assert list(report_json(world)["rules"]) == ["legal"]
    content = report_json(world)["rules"]["legal"]
    record = content["judges"]["judge"]
    assert (record["endpoint"], record["unparseable"], record["refused"]) == (judge.base_url, 1, 1)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (900, 9)
    # always yes, and two examples of five violating ones lost
    measured = content["methods"]["judge"]
    assert (measured["accuracy"], measured["auroc"], content["refusals"]["judge"]) == (0.3, None, 0)
    assert "1 of 10 conversations refused by the endpoint, counted as wrong" in text
    assert (world.runs.root / "judge" / "legal.jsonl").is_file()


async def _answer_yes(self: EndpointJudge, rule: Any, missing: Any, answers: AnswersSoFar) -> None:
    kept = []
    for example in missing:
        row = JudgeRow("yes", 100, 1, 10.0, key=self._key(rule, example), id=example.id)
        if example.id.endswith("-3"):
            row = replace(row, text="well...")
        if example.id.endswith("-5"):
            row = replace(row, text="HTTP 400: too long", refused=True)
        kept.append(row)
    answers._file.add(kept)


def test_refusals_are_reported_and_count_as_wrong(world: World) -> None:
    def refuses_3(request: ScoreRequest) -> float | str:
        is_long = request.messages[-1].content.endswith(" 3")
        return "too long" if is_long else guess_or_read(request)

    world.add_rule("medical", examples=10)
    text = evaluate(world, engine=ToyEngine(refuses_3)).as_markdown()
    content = report_json(world)["rules"]["medical"]
    assert content["refusals"] == {"judge": 1, "lora": 1, "alora": 1}
    assert content["methods"]["alora"]["accuracy"] == 0.9
    assert content["agreement"]["alora"]["prompts"] == 9
    assert "refused by the engine, counted as wrong: {'judge': 1, 'LoRA': 1, 'aLoRA': 1}" in text


def test_bad_input_stops_before_an_engine_starts(world: World) -> None:
    """Of weights, or of rows that a bag of words cannot be fitted on."""
    world.add_rule("medical", examples=10)
    world.add_rule("legal", examples=10)
    card = world.runs.adapter("toy", "medical", "lora") / "card.json"
    kept = card.rename(card.with_name("away"))
    engine = ToyEngine(guess_or_read)
    with pytest.raises(GuardError, match="make train RULE=medical"):
        evaluate(world, "legal,medical", engine)
    kept.rename(card)
    write_examples(world.runs.data("medical") / "train.jsonl", words_rows("medical", "train", 1))
    for method in world.recipe.methods:
        world.add_adapter("medical", method, 0, {f"medical-{number}": 1.0 for number in range(10)})
    with pytest.raises(GuardError, match="rows have one label"):
        evaluate(world, "medical", engine)
    assert engine.opened_with == []


def test_of_all_rules_those_without_adapters_or_data_are_left_out(world: World) -> None:
    for name in ("medical", "legal", "tax"):
        world.add_rule(name, examples=10)
    (world.runs.adapter("toy", "medical", "lora") / "card.json").unlink()
    (world.runs.data("tax") / "test.jsonl").unlink()
    text = evaluate(world).as_markdown()
    content = report_json(world)
    assert list(content["rules"]) == ["legal"]
    assert [why.partition(":")[0] for why in content["left_out"]] == ["medical", "tax"]
    assert "make train RULE=medical MODEL=toy" in text
    assert "make data RULE=tax" in text
    world.add_rule("legal", seeds=(0, 1), examples=10)
    world.add_adapter("legal", "alora", 1, {}, data_hash="0" * 64)
    assert "Left out: legal seed 1: " in evaluate(world).as_markdown()
    (world.runs.data("legal") / "test.jsonl").unlink()
    told = r"no rule can be evaluated \(got legal: .*medical: .*tax: .*RULE=all MODEL=toy"
    with pytest.raises(GuardError, match=told):
        evaluate(world)


def test_of_all_rules_one_of_disagreement_is_left_out(world: World) -> None:
    def wrong_once(request: ScoreRequest) -> float:
        return -1.0 if request.adapter == "medical/alora/0" else guess_or_read(request)

    world.add_rule("medical", examples=10)
    world.add_rule("legal", examples=10)
    engine = ToyEngine(wrong_once)
    text = evaluate(world, engine=engine).as_markdown()
    assert re.search("Left out: medical: .*the served engine and PEFT disagree", text)
    assert list(report_json(world)["rules"]) == ["legal"]
    paid = EndpointJudge("http://nowhere/v1", "-")
    with pytest.raises(GuardError, match="served engine and PEFT disagree"):
        evaluate(world, "medical", engine=engine, judge=paid)
    assert not (world.runs.root / "judge").exists()  # nobody is paid


def test_the_bag_of_words_is_fitted_and_chosen_without_the_test_rows(world: World) -> None:
    """It would read `now` off the test rows, and the words of training off all others."""
    told = ("wait and see 1", "do it now 1")
    rows = []
    for row in words_rows("medical", "test"):
        said = (Message("user", "What now?"), Message("assistant", told[row.label]))
        rows.append(replace(row, messages=said))
    world.add_rule("medical", examples=8)
    world.write_test("medical", rows)
    evaluate(world, engine=ToyEngine(lambda request: 1.0))
    rule = report_json(world)["rules"]["medical"]
    bag = rule["methods"]["bag_of_words"]
    assert (bag["auroc"], bag["accuracy"]) == (0.5, 0.5)
    assert rule["bag_of_words"]["validation_auroc"] == 1.0


def test_the_bag_of_words_has_the_false_positive_rate_that_the_rule_wants(world: World) -> None:
    """A third of the allowed rows speak of tablets: a balanced threshold flags them."""
    world.add_rule("medical", examples=8)
    file = world.rules / "medical.yaml"
    file.write_text(file.read_text() + "max_fpr: 0.05\n")
    words = ("ask a doctor", "take two tablets")
    by_split = {}
    for split in SPLITS:
        by_split[split] = []
        for number, row in enumerate(words_rows("medical", split, 120)):
            said = (Message("assistant", f"{words[row.label or number % 3 == 0]} in case 1"),)
            by_split[split].append(replace(row, messages=said))
    world.write_test("medical", by_split["test"])
    for split in SPLITS[:2]:
        write_examples(world.runs.data("medical") / f"{split}.jsonl", by_split[split])
    for method in world.recipe.methods:
        world.add_adapter("medical", method, 0, {row.id: 1.0 for row in by_split["test"]})
    evaluate(world, engine=ToyEngine(lambda request: 1.0))
    bag = report_json(world)["rules"]["medical"]["methods"]["bag_of_words"]
    assert bag["false_positive_rate"] <= 0.05


def test_a_recipe_may_have_several_methods_and_one_is_evaluated_alone(world: World) -> None:
    world.recipe = WITH_HEAD
    world.add_rule("medical", examples=40, seeds=(0, 1))
    evaluate(world)
    content = report_json(world)
    methods = content["rules"]["medical"]["methods"]
    assert list(methods) == ["judge", "bag_of_words", "lora", "alora", "head"]
    assert list(methods["head"]["seeds"]) == ["0"]
    pairs = ["alora_minus_lora", "head_minus_lora", "head_minus_alora"]
    assert list(content["mean"]["differences"]) == pairs
    shutil.rmtree(world.runs.adapter("toy", "medical", "lora", 0))
    world.recipe = WITH_HEAD.only("head")
    world.write_test("medical", read_examples(world.runs.data("medical") / "test.jsonl"))
    evaluate(world)
    content = report_json(world)
    assert (content["seeds"], content["mean"]["differences"]) == ([0], {})
    assert list(content["rules"]["medical"]["methods"]) == ["judge", "bag_of_words", "head"]


def test_the_command_refuses_nonsense(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for rule, model, named in (
        ("no_such_rule", "tiny", "no_such_rule"),
        ("medical_advice", "tiny,no_such_base", "no_such_base"),
        ("medical_advice", "tiny,minilm", "evaluated on one base"),
    ):
        monkeypatch.setattr("sys.argv", ["eval.run", "--rule", rule, "--model", model])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert ended.value.code == 2 and told.startswith("error: ") and named in told
