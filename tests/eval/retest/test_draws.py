"""Two draws of a rule, before anything is asked about them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eval.retest.draws import TwoDraws, all_draws
from guard.conversation.example import Split, read_examples, write_examples
from guard.errors import GuardError
from guard.layout import Runs
from tests.eval.conftest import World
from tests.eval.retest.second_draw import second_set


def draws_of(world: World, selection: str, data: Path | None) -> list[TwoDraws]:
    draws, _ = all_draws(selection, world.recipe, data, world.runs, world.rules)
    return draws


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_rows_that_come_close_to_a_row_of_the_first_set_are_dropped_and_counted(
    world: World, split: Split
) -> None:
    world.add_rule("medical", examples=40)
    data = world.runs.data("medical")
    folder = second_set(world, "medical")
    second = read_examples(folder / "medical" / "test.jsonl")
    first = read_examples(data / "test.jsonl") if split == "test" else []
    write_examples(
        data / f"{split}.jsonl",
        [*first, *(replace(row, id=f"first-{row.id}", split=split) for row in second[:6])],
    )
    for method in world.recipe.methods:
        world.add_adapter(
            "medical", method, 0, {row.id: 0.0 for row in read_examples(data / "test.jsonl")}
        )
    [of_rule] = draws_of(world, "medical", folder)
    assert of_rule.dropped == 6
    assert of_rule.second.examples == tuple(second[6:])


def test_the_second_draw_s_answers_are_kept_apart_from_the_first_s(world: World) -> None:
    world.add_rule("medical", examples=40)
    [of_rule] = draws_of(world, "medical", second_set(world, "medical"))
    assert of_rule.second.folder == of_rule.first.folder / "retest"
    assert of_rule.second.contestants == of_rule.first.contestants


def test_the_first_set_again_or_one_of_another_source_is_refused(world: World) -> None:
    world.add_rule("medical", examples=40)
    folder = world.runs.root / "second"
    shutil.copytree(world.runs.data("medical"), folder / "medical")
    with pytest.raises(
        GuardError, match="every row of the second test set comes close to a row of the first"
    ):
        draws_of(world, "medical", folder)
    world.add_manifest("medical", "mine.jsonl")
    (folder / "medical" / "manifest.json").write_text(json.dumps({"source": "generator"}))
    with pytest.raises(GuardError, match=r"(?s)another source.*generator, the first mine\.jsonl"):
        draws_of(world, "medical", folder)


def test_without_a_second_test_set_the_error_says_how_to_write_one(world: World) -> None:
    world.add_rule("medical", examples=40)
    with pytest.raises(GuardError, match=r"(?s)no second test set.*--rule medical --seed 1"):
        draws_of(world, "medical", world.runs.root / "nowhere")


def test_the_generator_draws_again_only_what_it_drew_first(world: World) -> None:
    world.add_rule("medical", examples=40)
    command = r"python -m eval\.retest\.run --data FOLDER"
    with pytest.raises(GuardError, match=rf"(?s)not the offline generator's.*{command}"):
        draws_of(world, "medical", None)
    with pytest.raises(GuardError, match=r"(?s)no test.jsonl.*make all RULE=medical"):
        none = Runs(world.root / "none")
        all_draws("medical", world.recipe, None, none, world.rules)


def test_of_all_rules_those_without_a_second_set_are_left_out_and_one_has_to_remain(
    world: World,
) -> None:
    world.add_rule("legal", examples=40)
    world.add_rule("medical", examples=40)
    folder = second_set(world, "medical")
    draws, left_out = all_draws("all", world.recipe, folder, world.runs, world.rules)
    assert [of_rule.first.rule.id for of_rule in draws] == ["medical"]
    assert len(left_out) == 1
    assert left_out[0].startswith("legal: ") and "no second test set" in left_out[0]
    with pytest.raises(GuardError, match=r"(?s)no rule has a second test set.*legal: .*medical: "):
        draws_of(world, "all", None)
