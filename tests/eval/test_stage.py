"""A base's stage by itself: which evaluations hold, and what is asked before a judge is paid."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import MonkeyPatch

import guard.recipe
from eval.bag_of_words import BagVariant
from eval.judge.judges import BareBase, Judge
from eval.stage import CODE, Stage
from guard.conversation.example import read_examples
from guard.home import ROOT
from guard.layout import running_code
from serve.engine import ScoreRequest
from tests.eval.conftest import WITH_HEAD, ToyEngine, World, answers, guess_or_read

pytestmark = pytest.mark.slow

BAG = BagVariant(view="last turn", ngrams="words 1-2", c=1.0, validation_auroc=0.5)


def stage(world: World, judge: Judge | None = None, selection: str = "all") -> Stage:
    """The stage, with the trials of the selected rules."""
    made = Stage(world.runs, world.recipe, judge or BareBase(), world.rules, selection)
    made.select()
    return made


def evaluated(world: World, selection: str = "all", engine: ToyEngine | None = None) -> ToyEngine:
    """The engine, once the selected rules are evaluated; the bag of words always says yes."""
    engine = engine or ToyEngine(guess_or_read)
    on_base = stage(world, selection=selection)
    bags = {trial.rule.id: (BAG, answers([1.0] * len(trial.examples))) for trial in on_base.trials}
    on_base.evaluate_outdated(bags, force=False, open_predictor=engine.open)
    return engine


@pytest.mark.parametrize("content", [None, '{"rule": "medi', '{"rule": "medical"}', "\u00ff"])
def test_a_lost_or_torn_evaluation_is_made_again(content: str | None, world: World) -> None:
    world.add_rule("medical", examples=10)
    world.add_rule("legal", examples=10)
    evaluated(world)
    evaluation = world.runs.root / "toy/medical/eval/evaluation.json"
    whole = evaluation.read_bytes()
    evaluation.unlink() if content is None else evaluation.write_text(content, encoding="latin-1")
    assert [trial.rule.id for trial in stage(world).outdated] == ["medical"]
    assert evaluated(world, "medical").opened_with == []
    assert evaluation.read_bytes() == whole
    assert stage(world).outdated == []


def test_the_engine_has_the_type_of_kept_answers(world: World, monkeypatch: MonkeyPatch) -> None:
    """With a head among the methods all are answered in the type of training."""
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cpu")
    monkeypatch.setattr(guard.recipe, "multiplies_bfloat16", lambda: True)
    world.recipe = WITH_HEAD
    assert world.recipe.serving_dtype == "bfloat16"
    world.add_rule("medical", examples=40)
    engine = evaluated(world)
    rows = read_examples(world.runs.data("medical") / "test.jsonl")
    world.write_test("medical", rows, seeds=(0, 1))  # an adapter's answers are missing, no head's
    evaluated(world, engine=engine)
    assert engine.dtypes == ["float32", "float32"]


def test_a_forced_evaluation_that_is_interrupted_is_outdated(world: World) -> None:
    """Else the advice to run it again without FORCE=1 would print the old figures."""
    world.add_rule("medical", examples=10)
    evaluated(world)
    forced = stage(world)
    assert forced.outdated == []
    forced.trials.clear()
    forced.select(force=True)
    forced.forget()
    assert [trial.rule.id for trial in stage(world).outdated] == ["medical"]


def test_other_code_of_figures_outdates_even_edited_meanwhile(
    world: World, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    """The logits stay what they were. The next process runs the code as it is then."""
    assert set((ROOT / "eval").rglob("*.py")) < set(CODE)
    assert {"calibration_rows.py", "dimensions.py"} < {path.name for path in CODE}
    world.add_rule("medical", examples=10)
    evaluated(world)
    edited = tmp_path / "verdict.py"
    edited.write_text("# another version")
    code = tuple(edited if path.name == edited.name else path for path in CODE)
    monkeypatch.setattr("eval.stage.CODE", code)
    assert [trial.rule.id for trial in stage(world).outdated] == ["medical"]
    assert evaluated(world).requests == []
    monkeypatch.setattr("eval.stage.CODE", (edited,))
    world.add_rule("legal", examples=10)

    def reads_and_is_edited(request: ScoreRequest) -> float:
        edited.write_text("# a third version")
        return guess_or_read(request)

    running_code.cache_clear()
    evaluated(world, engine=ToyEngine(reads_and_is_edited))
    running_code.cache_clear()
    assert {trial.rule.id for trial in stage(world).outdated} == {"legal", "medical"}
