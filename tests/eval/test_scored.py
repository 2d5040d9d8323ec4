"""Answers held against labels, as arrays."""

from __future__ import annotations

from eval.answer import Answer
from eval.scored import group_numbers, is_right, outcomes, scored_answers, unanswered
from guard.conversation.example import Example, Message

ANSWERS = [
    Answer(True, 2.0, 0.9, True),
    Answer(False),
    Answer(None),
    Answer(None),
]
LABELS = [1, 1, 1, 0]


def rows() -> list[Example]:
    """Four rows, of which the first and the last share a group."""
    made = []
    for number, (label, group) in enumerate(zip(LABELS, "abca", strict=True)):
        said = (Message("user", str(number)),)
        made.append(Example(f"e{number}", "toy", said, label, "test", "toy", group, {}))
    return made


def test_a_missing_answer_is_the_wrong_decision_whatever_the_label() -> None:
    assert scored_answers(LABELS, ANSWERS).decisions.tolist() == [1, 0, 0, 1]


def test_arrays_of_evidence_cover_only_the_answers_that_have_it() -> None:
    scored = scored_answers(LABELS, ANSWERS)
    assert (scored.ranked_labels.tolist(), scored.logits.tolist()) == ([1], [2.0])
    assert (scored.p_labels.tolist(), scored.p_violation.tolist()) == ([1], [0.9])
    assert scored.is_confident.tolist() == [True]
    assert scored.is_right_where_confident.tolist() == [True]
    assert scored.has_both_labels and not scored_answers([1], ANSWERS[:1]).has_both_labels


def test_outcomes_are_right_or_wrong_by_seed_and_example() -> None:
    by_seed = {0: ANSWERS, 1: [Answer(True)] * 4}
    right = outcomes(rows(), by_seed)
    assert right.values.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert right.groups.tolist() == group_numbers(rows()).tolist() == [0, 1, 2, 0]
    assert is_right(rows(), ANSWERS).tolist() == [True, False, False, False]
    assert unanswered(by_seed.values()) == 2
