"""Which turn violates: three ways to name it, on logits that are known."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from eval.experiments.violating_turn import (
    RightShare,
    ViolatingTurns,
    main,
    measure,
    violating_turn,
)
from eval.metrics import wilson_interval
from guard.conversation.example import Example, Message, write_examples
from guard.errors import GuardError
from guard.rule import load_rule
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World

RULE = "medical"


def row(number: int, *logits: int, violating: int | None = 2) -> Example:
    """A row whose turns have these numbers; the toy engine says the highest that it sees."""
    turns = [Message(("user", "assistant")[turn % 2], f"{n}") for turn, n in enumerate(logits)]
    acts = [f"{RULE}/dose" if turn == violating else None for turn in range(len(turns))]
    return Example(
        id=f"row-{number}",
        rule=RULE,
        messages=tuple(turns),
        label=int(violating is not None),
        split="test",
        source="toy",
        group=f"{number}",
        meta={"violating_act": "dose", "acts": acts},
    )


ROWS = [
    row(0, -8, -9, 4, -9),  # as it should be
    row(1, 2, -9, 9, -9),  # a false alarm before
    row(2, -8, -9, -1, -9),  # never detected
    row(3, -8, -9, -9, -9, violating=None),
    row(4, -8, 4, violating=1),  # too short to choose from
]


def measured(world: World, engine: ToyEngine) -> ViolatingTurns:
    return measure(RULE, world.recipe, world.runs, "alora", engine.open)


def test_each_way_is_right_where_its_logits_say_so(world: World) -> None:
    world.add_rule(RULE)
    world.write_test(RULE, ROWS)
    report = measured(world, ToyEngine())
    assert (report.first_violation.right, report.first_violation.total) == (1, 3)
    assert report.largest_rise.right == report.leave_one_out.right == 3
    assert (report.detected.right, report.turn_itself.right) == (2, 2)
    assert (report.turns_before.right, report.turns_before.total) == (4, 6)
    assert (report.turns_after.right, report.turns_after.total) == (2, 3)
    assert report.allowed_by_accuracy == pytest.approx((4 / 6) ** 2 * 2 / 3)
    low, high = report.first_violation.ci95
    assert low < 1 / 3 < high
    assert "33.3 [" in report.as_markdown() and "1 of 3" in report.as_markdown()


def test_the_turns_of_a_row_stand_or_fall_together() -> None:
    """Forty turns are no more certain than the four rows of which one is wrong."""
    by_row = [[row > 0] * 10 for row in range(4)]
    apart = RightShare.of([[turn] for row in by_row for turn in row], np.arange(40))
    together = RightShare.of(by_row, np.arange(4))
    assert (together.right, together.total) == (apart.right, apart.total) == (30, 40)
    assert apart.ci95 == pytest.approx(wilson_interval(0.75, 40), abs=0.03)
    assert together.ci95 == (0.25, 1.0)
    assert RightShare.of([[], []], np.arange(2)).ci95 == (0.0, 1.0)


def test_rows_that_the_weights_may_have_been_trained_on_are_refused(world: World) -> None:
    world.add_rule(RULE)
    world.write_test(RULE, ROWS)
    write_examples(world.runs.data(RULE) / "test.jsonl", ROWS[:3])
    with pytest.raises(GuardError, match="trained on other data"):
        measured(world, ToyEngine())


def test_a_row_says_which_turn_violates_only_if_one_does() -> None:
    assert [violating_turn(example) for example in ROWS] == [2, 2, 2, None, 1]


def test_a_rule_on_the_last_turn_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = load_rule("toxicity").model_copy(update={"turns": "last"})
    monkeypatch.setattr("eval.experiments.violating_turn.load_rule", lambda name: rule)
    monkeypatch.setattr(sys, "argv", ["violating_turn", "--rule", "toxicity"])
    with pytest.raises(SystemExit):
        main()
    assert "that turn always violates" in capsys.readouterr().err


def test_without_rows_that_know_or_a_verdict_there_is_no_figure(world: World) -> None:
    world.add_rule(RULE)
    with pytest.raises(GuardError, match="which turn violates"):
        measured(world, ToyEngine())
    world.write_test(RULE, ROWS)

    def refused(_: ScoreRequest) -> str:
        return "it does not fit"

    with pytest.raises(GuardError, match="refused"):
        measured(world, ToyEngine(refused))
