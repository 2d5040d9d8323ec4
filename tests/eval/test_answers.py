"""Answers held against labels, as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from eval.answers import Answer, is_baseline, label_of, on_base, outcomes, scored_answers

ANSWERS = [Answer(True, 2.0, 0.9, True), Answer(False), Answer(None), Answer(None)]
LABELS = [1, 1, 1, 0]


def test_a_missing_answer_is_the_wrong_decision_and_unstated_evidence_is_no_number() -> None:
    scored = scored_answers(LABELS, ANSWERS, range(4))
    assert scored.decisions.tolist() == [1, 0, 0, 1]
    assert scored.is_answered.tolist() == [True, True, False, False]
    evidence = np.array([scored.logits, scored.p_violation, scored.confident])
    assert evidence[:, 0].tolist() == [2.0, 0.9, 1.0] and np.isnan(evidence[:, 1:]).all()
    part = scored.part([3, 0])
    assert (part.labels.tolist(), part.groups.tolist()) == ([0, 1], [3, 0])
    assert part.logits[1] == 2.0


def test_outcomes_are_right_or_wrong_by_seed_and_example() -> None:
    by_seed = [scored_answers(LABELS, told, range(4)) for told in (ANSWERS, [Answer(True)] * 4)]
    assert outcomes(by_seed).values.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


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
