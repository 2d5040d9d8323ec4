"""The table of long turns: which rows, and what is counted."""

from __future__ import annotations

import pytest

from data.long_turns import POSITIONS
from eval.study.lengths import Lengths, lengths
from guard.coverage import Coverage, packed_words
from guard.errors import GuardError
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World, evidence

LENGTH = 2_000


def measured(world: World, engine: ToyEngine) -> Lengths:
    where = {"runs": world.runs, "rules": world.rules, "open_predictor": engine.open}
    return lengths("medical", world.recipe, characters=(LENGTH,), rows=20, **where)


def misses_long_ones(request: ScoreRequest) -> float:
    """Allows whatever stands in or behind a long turn."""
    if max(len(message.content) for message in request.messages) > LENGTH / 2:
        return -3.0
    return evidence(request.messages)


def test_what_is_missed_in_long_turns_is_counted_by_position(world: World) -> None:
    with pytest.raises(GuardError):
        measured(world, ToyEngine())  # the rule is not trained
    world.add_rule(examples=40)
    table = measured(world, ToyEngine(misses_long_ones))
    cells = {(cell.method, cell.position): cell for cell in table.cells}
    for method in ("lora", "alora"):
        plain = cells[method, "as it is"]
        assert (plain.n, plain.violating, plain.missed, plain.flagged) == (20, 10, 0, 0)
        for position in POSITIONS:
            cell = cells[method, position]
            assert (cell.characters, cell.n, cell.missed) == (LENGTH, 20, 10)
            assert cell.missed_confident == 10  # as nothing says what the rows covered
    row = "| 2,000 | before | lora | 20 | 100.0 | 100.0 | 0.0 "
    assert row in " ".join(table.as_markdown().split())


def test_what_the_rows_did_not_cover_is_missed_without_confidence(world: World) -> None:
    world.add_rule(examples=40)
    turns = {"turns": 9, "longest_turns": {"user": 500, "assistant": 500}, "speakers": ()}
    words = {"words": packed_words([]), "letters": "", "unknown_share": 1.0}
    short = Coverage(characters=500, sure_logit=-1.0, sure_logit_long=None, **turns, **words)
    for method in world.recipe.methods:
        logits = {f"medical-{n}": float(n if n % 2 else -n - 1) for n in range(40)}
        world.add_adapter("medical", method, 0, logits, coverage=short)
    for cell in measured(world, ToyEngine(misses_long_ones)).cells:
        assert cell.missed_confident == 0
        assert (cell.confident > 0) == (cell.position == "as it is")


def test_answers_are_kept_and_refusals_counted(world: World) -> None:
    world.add_rule(examples=40)
    engine = ToyEngine(lambda request: "it does not fit")
    assert all(cell.unjudged == cell.n == 20 for cell in measured(world, engine).cells)
    answering = ToyEngine()
    first = measured(world, answering)
    asked = len(answering.requests)
    assert measured(world, answering).cells == first.cells and len(answering.requests) == asked
