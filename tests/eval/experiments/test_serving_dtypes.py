"""Verdicts in two dtypes: flips, accuracy, AUROC and logits that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from eval.experiments.serving_dtypes import ServingDtypes, mean_change, measure
from guard.conversation.example import read_examples, write_examples
from guard.errors import GuardError
from guard.recipe import Recipe
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World, evidence

RULES = ("medical", "refunds")
ROWS = 40


class Rounding:
    """Engines of a formula: in bfloat16 a rule's logit is what `rounded` makes of the exact one."""

    def __init__(self, rounded: Mapping[str, Callable[[float], float]]) -> None:
        self.rounded = rounded
        self.dtypes: list[str] = []

    def open(
        self, recipe: Recipe, adapters: Mapping[str, Path]
    ) -> AbstractContextManager[ToyEngine]:
        dtype = recipe.serving_dtype
        self.dtypes.append(dtype)

        def logit(request: ScoreRequest) -> float:
            rule = request.adapter
            assert rule is not None and rule in adapters
            exact = evidence(request.messages)
            if dtype == "bfloat16" and rule in self.rounded:
                return self.rounded[rule](exact)
            return exact

        return ToyEngine(logit).open(recipe, adapters)


def measured(world: World, engine: Rounding) -> ServingDtypes:
    return measure(None, world.recipe, world.runs, "alora", engine.open)


@pytest.fixture
def trained(world: World) -> World:
    """Two rules whose violating rows have the logits 1, 3, … 39, and the others -1, -3, … -39."""
    for rule in RULES:
        world.add_rule(rule, examples=ROWS)
    return world


def test_a_shift_flips_the_verdicts_that_it_carries_over_the_threshold(trained: World) -> None:
    engine = Rounding({"medical": lambda logit: logit + 4})
    report = measured(trained, engine)
    assert engine.dtypes == ["float32", "bfloat16"]
    shifted, same = report.rules["medical"], report.rules["refunds"]
    assert (shifted.rows, shifted.flips, same.flips) == (ROWS, 2, 0)  # those of -1 and -3
    assert shifted.accuracy == pytest.approx((1, 1 - 2 / ROWS))
    assert (shifted.auroc, same.accuracy, same.auroc) == ((1, 1), (1, 1), (1, 1))
    assert (shifted.median_nats, shifted.p95_nats, shifted.max_nats) == (4, 4, 4)
    assert (same.median_nats, same.max_nats) == (0, 0)
    assert (report.rows, report.flips) == (2 * ROWS, 2)
    assert report.accuracy_change == pytest.approx(-1 / ROWS)
    low, high = report.accuracy_change_ci95
    assert low < -1 / ROWS < 0 < high
    assert "2 of 80 verdicts differ" in report.as_markdown()


def test_rows_that_change_places_change_the_auroc(trained: World) -> None:
    report = measured(trained, Rounding(dict.fromkeys(RULES, lambda logit: -logit)))
    assert [rule.auroc for rule in report.rules.values()] == [(1, 0), (1, 0)]
    assert (report.auroc_change, report.auroc_change_ci95) == (-1, (-1, -1))
    assert report.flips == report.rows


def test_the_interval_is_student_s_over_rules() -> None:
    mean, (low, high) = mean_change([(0.8, 0.7), (0.9, 0.9), (0.5, 0.6), (0.4, 0.3)])
    assert mean == pytest.approx(-0.025)
    # changes -.1, 0, .1, -.1: standard deviation .0957; 97.5 % of t with 3 degrees: 3.182
    assert (low, high) == pytest.approx((-0.025 - 0.1523, -0.025 + 0.1523), abs=1e-4)


def test_without_a_second_rule_or_a_verdict_there_is_no_figure(world: World) -> None:
    world.add_rule("medical")
    with pytest.raises(GuardError, match="at least two trained rules are needed"):
        measured(world, Rounding({}))
    world.add_rule("refunds")
    with pytest.raises(GuardError, match="refused"):
        measure(None, world.recipe, world.runs, "alora", ToyEngine(lambda _: "too long").open)


def test_rows_that_the_weights_may_have_been_trained_on_are_refused(trained: World) -> None:
    test = trained.runs.data("medical") / "test.jsonl"
    write_examples(test, read_examples(test)[:10])
    with pytest.raises(GuardError, match="trained on other data"):
        measured(trained, Rounding({}))


def test_rows_of_one_label_have_no_auroc(trained: World) -> None:
    test = trained.runs.data("medical") / "test.jsonl"
    violating = [row for row in read_examples(test) if row.label]
    trained.write_test("medical", violating)
    with pytest.raises(GuardError, match="both labels"):
        measured(trained, Rounding({}))
