"""Answers held against labels, as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from eval.answers import (
    Answer,
    group_numbers,
    is_baseline,
    label_of,
    on_base,
    outcomes,
    scored_answers,
    unanswered,
)
from guard.conversation.example import Example, Message

ANSWERS = [Answer(True, 2.0, 0.9, True), Answer(False), Answer(None), Answer(None)]
LABELS = [1, 1, 1, 0]


def rows() -> list[Example]:
    """Four rows, of which the first and the last share a group."""
    made = []
    for number, (label, group) in enumerate(zip(LABELS, "abca", strict=True)):
        said = (Message("user", str(number)),)
        made.append(Example(f"e{number}", "toy", said, label, "test", "toy", group, {}))
    return made


def test_a_missing_answer_is_the_wrong_decision_whatever_the_label() -> None:
    scored = scored_answers(LABELS, ANSWERS, range(4))
    assert scored.decisions.tolist() == [1, 0, 0, 1]
    assert scored.is_answered.tolist() == [True, True, False, False]
    assert scored.is_right.tolist() == [True, False, False, False]


def test_evidence_that_is_not_stated_is_no_number_and_a_part_has_that_of_its_rows() -> None:
    scored = scored_answers(LABELS, ANSWERS, range(4))
    for values, stated in (
        (scored.logits, 2.0),
        (scored.p_violation, 0.9),
        (scored.confident, 1.0),
    ):
        assert values[0] == stated and np.isnan(values[1:]).all()
    part = scored.part([3, 0])
    assert (part.labels.tolist(), part.groups.tolist()) == ([0, 1], [3, 0])
    assert part.logits[1] == 2.0


def test_outcomes_are_right_or_wrong_by_seed_and_example() -> None:
    by_seed = {0: ANSWERS, 1: [Answer(True)] * 4}
    groups = group_numbers(rows())
    right = outcomes([scored_answers(LABELS, answers, groups) for answers in by_seed.values()])
    assert right.values.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert right.groups.tolist() == groups.tolist() == [0, 1, 2, 0]
    assert unanswered(by_seed.values()) == 2


@pytest.mark.parametrize(
    ("contender", "label", "baseline"),
    [
        ("lora", "LoRA", False),
        ("bag_of_words", "bag of words", True),
        (on_base("minilm", "lora"), "minilm LoRA", False),
        (on_base("tiny", "judge"), "tiny judge", True),
    ],
)
def test_a_contender_carries_its_base_s_name(contender: str, label: str, baseline: bool) -> None:
    assert label_of(contender) == label
    assert is_baseline(contender) is baseline
