"""One rule's figures, of what a toy engine answers on both draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.metrics import ece_expected
from eval.retest.answers import ServedDraws
from eval.retest.draws import all_draws
from eval.retest.report import RetestedRule
from eval.served import score_missing
from guard.conversation.example import read_examples
from guard.verdict import Calibration, expected_calibration_error
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World, evidence
from tests.eval.retest.second_draw import second_set


def figures(world: World, folder: Path, engine: ToyEngine | None = None) -> RetestedRule:
    draws, _ = all_draws("medical", world.recipe, folder, world.runs, world.rules)
    served = ServedDraws(draws[0])
    engine = engine or ToyEngine()
    score_missing([served.first, served.second], world.recipe, engine.open)
    return served.retested()


def test_the_same_knowledge_shows_no_change(world: World) -> None:
    world.add_rule("medical", examples=40, seeds=(0, 1))
    rule = figures(world, second_set(world, "medical"))
    assert list(rule.methods) == list(world.recipe.methods)
    for accuracy in rule.methods.values():
        assert (accuracy.first, accuracy.second) == (1.0, 1.0)
        assert (accuracy.change, accuracy.change_ci95) == (0.0, (0.0, 0.0))
    assert rule.seeds == (0, 1) and (rule.n_first, rule.n_second, rule.dropped) == (40, 40, 0)


def test_the_calibration_error_is_that_of_both_draws_together(world: World) -> None:
    world.add_rule("medical", examples=40, seeds=(0, 1))
    rule = figures(world, second_set(world, "medical"))
    rows = []
    for folder in ("data", "second"):
        rows += read_examples(world.runs.root / folder / "medical" / "test.jsonl")
    p = [Calibration(2.0).p_violation(evidence(row.messages)) for row in rows]
    ece = expected_calibration_error([row.label for row in rows], p)
    assert rule.ece == {method: pytest.approx(ece) for method in world.recipe.methods}
    floor = pytest.approx(ece_expected(p))
    assert rule.ece_expected == dict.fromkeys(world.recipe.methods, floor)


def test_a_refused_row_leaves_a_method_without_a_calibration_error(world: World) -> None:
    world.add_rule("medical", examples=40)

    def refuses_one(request: ScoreRequest) -> float | str:
        if "alora" in str(request.adapter) and evidence(request.messages) == 39:
            return "too long"
        return evidence(request.messages)

    rule = figures(world, second_set(world, "medical"), ToyEngine(refuses_one))
    assert rule.ece["alora"] is None and rule.ece_expected["alora"] is None
    assert rule.ece["lora"] is not None


def test_an_adapter_that_learnt_the_first_set_by_heart_is_seen(world: World) -> None:
    world.add_rule("medical", examples=40)

    def by_heart(request: ScoreRequest) -> float:
        is_known = "again" not in request.messages[0].content or "alora" not in str(request.adapter)
        return evidence(request.messages) if is_known else 1.0

    rule = figures(world, second_set(world, "medical", words="again"), ToyEngine(by_heart))
    alora = rule.methods["alora"]
    assert (alora.first, alora.second, alora.change) == (1.0, 0.5, -0.5)
    assert alora.change_ci95[1] < 0
    assert rule.methods["lora"].change == 0.0


def test_strata_are_told_apart(world: World) -> None:
    """By heart in what the first set calls unseen: the other stratum shows no change."""
    world.add_rule("medical", examples=40)
    folder = second_set(world, "medical", words="again")
    rows = read_examples(folder / "medical" / "test.jsonl")

    def by_heart(request: ScoreRequest) -> float:
        unseen = {row.messages for row in rows if row.meta["stratum"] == "unseen"}
        return 1.0 if tuple(request.messages) in unseen else evidence(request.messages)

    rule = figures(world, folder, ToyEngine(by_heart))
    assert set(rule.strata) == {"seen", "unseen"}
    assert rule.strata["seen"]["alora"].change == 0.0
    assert rule.strata["unseen"]["alora"].change == -0.5
    assert rule.methods["alora"].change == -0.25
