"""What validation rows are worth, and what they cover: their lengths, words, and a sure "allow"."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from guard.calibrate import calibrate
from guard.conversation.example import LONG_TURN, Example, Message, Split
from guard.coverage import ConversationForm
from guard.rule import load_rule
from guard.verdict import Calibration, expected_calibration_error
from tests.guard.test_calibrate import sample
from train.calibration.coverage import LONG_ROWS, MOST_UNKNOWN, coverage, long_rows, sure_logit
from train.calibration.validation import calibrated_loss, validation_loss, validation_metrics


def test_what_the_probabilities_are_worth_is_measured_on_rows_that_were_not_fitted() -> None:
    few = [-3.0, -2.5, 2.8, -1.0, -0.5, 0.4, 1.2, -2.7, 2.2, 3.1]  # two are far off
    few_labels = [0] * 5 + [1] * 5
    found = calibrate(few, few_labels)
    fitted = expected_calibration_error(few_labels, [found.p_violation(logit) for logit in few])
    assert validation_metrics(few, few_labels, found)["ece"] != pytest.approx(fitted, abs=0.01)
    logits, labels = sample(0.0)
    metrics = validation_metrics(logits, labels, calibrate(logits, labels))
    assert metrics["ece"] < 0.03
    bins = metrics["reliability"]
    assert [one["n"] for one in bins] == [200] * 10
    assert all(one["ci95"][0] - 0.02 <= one["p"] <= one["ci95"][1] + 0.02 for one in bins)
    assert bins[0]["violates"] < 0.1 < 0.9 < bins[-1]["violates"]


def test_metrics_of_a_hand_made_split() -> None:
    metrics = validation_metrics([-2.0, 1.0, 2.0, 3.0], [0, 0, 1, 1], Calibration())
    expected = {"n": 4, "accuracy": 0.75, "auroc": 1.0}
    expected["accuracy_ci95"] = [0.3006, 0.9544]  # Wilson's interval for 3 of 4
    assert expected.items() <= metrics.items()


def test_the_auroc_is_sklearn_s_with_ties_too() -> None:
    labels = np.arange(50) % 2
    logits = np.random.default_rng(1).normal(labels, 1.0).round(1)
    metrics = validation_metrics(logits.tolist(), labels.tolist(), Calibration())
    assert metrics["auroc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)
    low, high = metrics["auroc_ci95"]
    assert low < metrics["auroc"] < high


def test_the_validation_loss_is_the_mean_negative_log_likelihood() -> None:
    """A logit that is not finite is the worst loss after calibration."""
    probabilities = np.array([0.9, 0.2, 0.4])
    logits = np.log(probabilities / (1 - probabilities))
    expected = -np.log([0.9, 1 - 0.2, 0.4]).mean()
    assert validation_loss(logits, [1, 0, 1]) == pytest.approx(expected, abs=1e-6)
    assert validation_loss([1000.0, -1000.0], [0, 1]) == 1000.0
    for broken in (float("nan"), float("inf")):
        assert calibrated_loss([1.0, -1.0, broken, 0.5], [1, 0, 1, 0]) == float("inf")


def test_a_loss_after_calibration_asks_neither_how_sure_logits_are_nor_where_they_turn() -> None:
    logits, labels = sample(0.0)
    x = np.array(logits)
    loss = calibrated_loss(logits, labels)
    assert calibrated_loss((5 * x - 3).tolist(), labels) == pytest.approx(loss, rel=1e-4)
    assert validation_loss((5 * x - 3).tolist(), labels) > 1.5 * loss
    assert loss <= validation_loss(logits, labels) + 1e-4
    noise = np.random.default_rng(1).normal(size=len(labels)).tolist()
    assert loss < calibrated_loss(noise, labels) == pytest.approx(np.log(2), abs=0.001)


RULE = load_rule("medical_advice")
TEXT = "ask a doctor about the pain in your head and take care of it today"


def rows(count: int, split: Split = "validation") -> list[Example]:
    rng = random.Random(split)
    made = []
    for number in range(count):
        said = (Message("assistant", " ".join(rng.sample(TEXT.split(), 12))),)
        name = f"{split}-{number}"
        made.append(Example(name, RULE.id, said, number % 2, split, "own", str(number)))
    return made


def test_violating_validation_rows_are_written_with_long_turns() -> None:
    long = long_rows(RULE, rows(400))
    assert len(long) == LONG_ROWS and all(row.label for row in long)
    assert len({row.meta["long_turn"]["position"] for row in long}) == 4
    assert long == long_rows(RULE, rows(400))
    assert len(long_rows(RULE, rows(6))) == 3


def test_lengths_reach_as_far_as_some_rows_and_not_as_the_longest() -> None:
    validation = rows(400)
    long = long_rows(RULE, validation)
    logits = [2.0 if row.label else -4.0 for row in validation]
    covered = coverage(rows(50, "train"), validation, logits, long, [1.0] * len(long))
    assert (covered.sure_logit, covered.sure_logit_long) == (2.0, 1.0)
    for speaker in ("assistant", "tool"):
        lengths: list[int] = []
        for row in long:
            turns = [len(m.content) for m in row.messages if m.role == speaker]
            lengths.append(max(turns, default=0))
        lengths.sort()
        assert covered.longest_turns[speaker] == lengths[-10] < lengths[-1]
    assert covered.speakers == ("assistant",) and covered.turns == 2
    assert covered.has(ConversationForm(validation[0].messages))
    assert covered.unknown_share < 0.1
    german = Message("assistant", "Nehmen Sie Ibuprofen gegen Schmerzen")
    assert not covered.has(ConversationForm([german]))


def test_a_rule_that_is_written_with_long_results_alone_covers_no_long_reply() -> None:
    confined = RULE.model_copy(update={"depends_on_context": True})
    validation = rows(400)
    long = long_rows(confined, validation)
    covered = coverage(rows(50, "train"), validation, [1.0] * 400, long, [1.0] * len(long))
    assert covered.longest_turns["assistant"] == LONG_TURN < covered.longest_turns["tool"]


def test_own_rows_that_are_long_are_covered_as_they_are() -> None:
    validation = [
        replace(row, messages=(Message("assistant", f"{TEXT} " * 300),)) for row in rows(40)
    ]
    covered = coverage(rows(50, "train"), validation, [-1.0] * 40, [], [])
    assert covered.longest_turns["assistant"] == len(validation[0].messages[0].content)
    assert (covered.sure_logit, covered.sure_logit_long) == (None, -1.0)


def test_tricks_make_no_unknown_text_usual() -> None:
    validation = rows(100)
    spelled = []
    for row in rows(30):
        said = (Message("assistant", " ".join(row.messages[0].content)),)
        spelled.append(replace(row, messages=said, meta={"trick": "spaced"}))
    logits = [1.0] * 130
    assert coverage(rows(50, "train"), [*validation, *spelled], logits, [], []).unknown_share < 0.1
    told = [replace(row, meta={}) for row in spelled]
    covered = coverage(rows(50, "train"), [*validation, *told], logits, [], [])
    assert covered.unknown_share == MOST_UNKNOWN


def test_languages_are_those_of_the_rows_but_for_a_few_rows_and_for_short_ones() -> None:
    german = "Fragen Sie wegen der Schmerzen im Kopf heute noch Ihren Arzt"
    short = "Frag den Arzt"
    cases: list[tuple[str, int, tuple[str, ...] | None]] = [(german, 1, ("en",))]
    cases += [(german, 20, ("de", "en")), (german, 40, ("de",))]
    cases += [(short, 30, ("en",)), (short, 31, None)]
    for text, count, languages in cases:
        validation = rows(40)
        for number in range(count):
            said = (Message("assistant", text),)
            validation[number] = replace(validation[number], messages=said)
        covered = coverage(rows(50, "train"), validation, [1.0] * 40, [], [])
        assert covered.languages == languages


def test_where_an_allow_is_sure_rows_in_phrasings_of_training_say_nothing() -> None:
    """They are judged better than what comes."""
    seen = [replace(row, meta={"stratum": "seen"}) for row in rows(40)]
    covered = coverage(rows(50, "train"), [*rows(40), *seen], [-2.0] * 40 + [-3.0] * 40, [], [])
    assert covered.sure_logit == -2.0


@pytest.mark.parametrize("rows_", [5, 100, 1_000])
def test_the_fewer_rows_the_lower_is_a_sure_logit(rows_: int) -> None:
    """At most one in a hundred normal logits lies below it, in nearly every draw."""
    rng = np.random.default_rng(rows_)
    below = []
    for _ in range(200):
        logit = sure_logit(rng.normal(size=rows_).tolist())
        assert logit is not None
        below.append(logit <= -2.326)  # the first percentile
    assert np.mean(below) >= 0.9


def test_a_sure_logit_is_below_every_row_and_of_few_rows_there_is_none() -> None:
    assert sure_logit([5.0] * 99 + [-7.0]) == -7.0
    assert sure_logit([1.0] * 4) is None
