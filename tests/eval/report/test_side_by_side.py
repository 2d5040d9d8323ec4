from __future__ import annotations

import pytest

from eval.evaluation import Evaluation
from eval.judge.answer import JudgeRecord
from eval.report.report import Report
from eval.report.side_by_side import distinct, distinct_versions, side_by_side
from guard.errors import GuardError
from tests.eval.conftest import World
from tests.eval.test_evaluation import evaluated


def two_bases(world: World) -> tuple[Evaluation, Evaluation]:
    """`other` has a LoRA alone, of the first seed, and nobody judges."""
    toy = evaluated(world)
    changed = {
        "model": "other",
        "seeds": (0,),
        "methods": {name: toy.methods[name] for name in ("bag_of_words", "lora")},
        "judges": {},
        "refusals": {"judge": 0, "lora": 2},
        "agreement": {},
        "right": {"lora": {"0": (0, 0, 1, 1, 1, 1, 1, 1)}},
        "commit": "def",
        "versions": {"python": "4"},
    }
    return toy, toy.model_copy(update=changed)


def test_contenders_carry_their_base_s_name_but_the_one_bag_of_words(world: World) -> None:
    joint = side_by_side(two_bases(world))
    names = ["toy/judge", "bag_of_words", "toy/lora", "toy/alora", "other/lora"]
    assert list(joint.methods) == names
    assert joint.trained == names[2:]
    assert (joint.model, joint.seeds) == ("toy, other", (0, 1))
    assert list(joint.judges) == ["toy/judge"]
    assert joint.refusals["other/lora"] == 2
    assert (joint.commit, joint.versions) == ("abc / def", {"python": "3 / 4"})


def test_methods_of_two_bases_are_compared_on_the_seeds_that_both_have(world: World) -> None:
    joint = side_by_side(two_bases(world))
    # the aLoRA's first seed is right everywhere
    outcomes = joint.difference("other/lora", "toy/alora")
    of_toy = joint.difference("toy/alora", "toy/lora")
    assert outcomes is not None and of_toy is not None and len(of_toy.values) == 2
    assert outcomes.values.tolist() == [[-1, -1, 0, 0, 0, 0, 0, 0]]


def test_a_judge_behind_an_endpoint_stands_there_once(world: World) -> None:
    judge = JudgeRecord(name="gpt-toy", endpoint="http://x")
    toy = evaluated(world).model_copy(update={"judges": {"judge": judge}})
    joint = side_by_side([toy, toy.model_copy(update={"model": "other"})])
    assert list(joint.judges) == ["judge"]
    assert list(joint.methods)[:2] == ["judge", "bag_of_words"]
    assert side_by_side([toy]) is toy


def test_other_examples_are_not_put_side_by_side(world: World) -> None:
    toy, other = two_bases(world)
    fewer = other.model_copy(update={"groups": toy.groups[:4], "n_test": 4})
    with pytest.raises(GuardError, match=r"medical on other: .*than toy.*4 examples, not 8.*MODEL"):
        side_by_side([toy, fewer])


def test_the_report_of_several_bases_compares_all_their_methods(world: World) -> None:
    text = Report((side_by_side(two_bases(world)),)).as_markdown()
    assert text.startswith("# Quality: toy, other\n")
    assert "- Measured on toy, other, seed 0, 1, commit abc / def" in text
    assert "other LoRA - toy LoRA: -12.5 points of mean accuracy" in text
    assert "- medical: refused by the engine, counted as wrong: {'toy judge': 1" in text


def test_what_is_the_same_everywhere_is_said_once() -> None:
    assert distinct(["abc", "def", "abc"]) == "abc / def"
    evaluated_with = [{"torch": "2", "peft": "1"}, {"torch": "3", "peft": "1"}, {"torch": "2"}]
    assert distinct_versions(evaluated_with) == {"torch": "2 / 3", "peft": "1"}
