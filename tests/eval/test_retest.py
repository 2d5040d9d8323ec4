from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eval.retest import Retest, retest
from guard.errors import GuardError
from guard.example import Message, read_examples, write_examples
from guard.recipe import METHODS
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World, evidence


def second_set(world: World, rule: str, *, words: str) -> Path:
    """The rule's test rows with `words` said before them, in another folder."""
    folder = world.runs.root / "second"
    rows = read_examples(world.runs.data(rule) / "test.jsonl")
    said = [replace(row, id=f"again-{row.id}", messages=(Message("user", f"{words} {row.id}"), *row.messages[1:])) for row in rows]
    (folder / rule).mkdir(parents=True)
    write_examples(folder / rule / "test.jsonl", said)
    return folder


def again(world: World, folder: Path, engine: ToyEngine | None = None) -> Retest:
    engine = engine or ToyEngine(lambda request: evidence(request.messages))
    return retest("all", world.recipe, folder, runs=world.runs, rules=world.rules, open_predictor=engine.open)


def test_the_same_knowledge_shows_no_change(world: World) -> None:
    world.add_rule("medical", examples=40, seeds=(0, 1))
    found = again(world, second_set(world, "medical", words="quite another question"))
    for method in METHODS:
        rule = found.rules["medical"].methods[method]
        assert (rule.first, rule.second, rule.change, rule.change_ci95) == (1.0, 1.0, 0.0, (0.0, 0.0))
    assert found.rules["medical"].seeds == (0, 1)
    assert "within the first's interval: 1 of 1" in found.as_markdown()


def test_an_adapter_that_learnt_the_first_set_by_heart_is_seen(world: World) -> None:
    world.add_rule("medical", examples=40)
    world.add_rule("legal", examples=40)

    def by_heart(request: ScoreRequest) -> float:
        is_known = "again" not in request.messages[0].content or "alora" not in str(request.adapter)
        return evidence(request.messages) if is_known else 1.0

    folder = second_set(world, "medical", words="again, quite another question")
    second_set(world, "legal", words="again, quite another question")
    found = again(world, folder, ToyEngine(by_heart))
    alora, lora = (found.rules["medical"].methods[method] for method in ("alora", "lora"))
    assert (alora.first, alora.second, alora.change) == (1.0, 0.5, -0.5)
    assert alora.change_ci95[1] < 0
    assert lora.change == 0.0
    assert found.mean_change["alora"] == -0.5
    assert "within the first's interval: 0 of 2" in found.as_markdown()


def test_rows_that_come_close_to_a_training_row_are_dropped_and_counted(world: World) -> None:
    world.add_rule("medical", examples=40)
    data = world.runs.data("medical")
    rows = read_examples(data / "test.jsonl")
    folder = second_set(world, "medical", words="quite another question")
    # the toy's rows differ in a number alone: what is not to count as near has to say more
    second = read_examples(folder / "medical" / "test.jsonl")
    worded = [
        replace(
            row,
            messages=(
                Message("user", " ".join(f"word{chr(97 + i)}{chr(97 + number % 26)}{number // 26 * 'x'}" for i in range(9))),
                *row.messages[1:],
            ),
        )
        for number, row in enumerate(second)
    ]
    write_examples(folder / "medical" / "test.jsonl", worded)
    write_examples(data / "train.jsonl", [replace(row, id=f"trained-{row.id}", split="train") for row in worded[:6]])
    for method in METHODS:
        world.add_adapter("medical", method, 0, {row.id: 0.0 for row in rows})
    found = again(world, folder)
    assert (found.rules["medical"].dropped, found.rules["medical"].n_second) == (6, 34)


def test_without_a_second_test_set_the_error_says_how_to_write_one(world: World) -> None:
    world.add_rule("medical", examples=40)
    with pytest.raises(GuardError, match=r"(?s)no second test set.*--rule medical --seed 1"):
        again(world, world.runs.root / "nowhere")
