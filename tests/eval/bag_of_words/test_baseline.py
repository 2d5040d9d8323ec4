"""Every view of a conversation earns its place, and the choice is one of the validation rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from eval.bag_of_words.baseline import STRENGTHS, fit_bag_of_words
from eval.bag_of_words.features import NGRAMS, VIEWS
from eval.scored import is_right
from guard.conversation.example import GENERATOR, Example, Message
from guard.errors import GuardError
from tests.eval.bag_of_words.conftest import early, judged, last, only, rows


@pytest.mark.parametrize(
    ("view", "turns"),
    [("whole conversation", early), ("judged speaker", judged), ("last turn", last)],
)
def test_the_view_that_tells_is_chosen_and_without_it_the_baseline_is_worse(
    view: str,
    turns: Callable[[int, list[str]], list[Message]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, validation = rows("train", turns), rows("validation", turns)
    fitted = fit_bag_of_words(train, validation, "assistant")
    assert (fitted.variant.view, fitted.variant.validation_auroc) == (view, 1.0)
    test = rows("test", turns)
    assert is_right(test, fitted.answers(test)).mean() > 0.9
    monkeypatch.delitem(VIEWS, view)
    without = fit_bag_of_words(train, validation, "assistant")
    assert without.variant.validation_auroc < 1.0


def test_the_first_of_equals_is_chosen_and_a_second_fit_is_the_same() -> None:
    train, validation = rows("train", only), rows("validation", only)
    fits = [fit_bag_of_words(train, validation, "assistant") for _ in range(2)]
    assert fits[0].variant.c == STRENGTHS[0]
    assert fits[0].variant.ngrams == next(iter(NGRAMS))
    assert fits[0].answers(validation) == fits[1].answers(validation)


def parts(label: int, noise: list[str]) -> list[Message]:
    """Words that occur once; their middles tell."""
    return [Message("user", f"{''.join(noise)}{('xkq', 'zvw')[label]}{noise[0]}{noise[1]}")]


def test_parts_of_words_tell_where_no_word_comes_twice() -> None:
    train, validation = rows("train", parts), rows("validation", parts)
    fitted = fit_bag_of_words(train, validation, "user")
    assert fitted.variant.ngrams == "words 1-2 and characters 2-5"
    assert fitted.variant.validation_auroc == 1.0


def rare(label: int, noise: list[str]) -> list[Message]:
    """A rare word tells; a common one agrees with it in two of three rows."""
    first = noise[0]
    agrees = first[0] in "bcdf"
    common = ("often", "seldom")[label if agrees else 1 - label]
    return [Message("assistant", f"{common} {common} {common} {first}{'xy'[label]}")]


def test_the_strengths_reach_to_where_rare_words_outweigh_a_common_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C = 100 won on 12 of 15 shipped rules, 1,000 on none: docs/lessons.md."""
    train, validation = rows("train", rare), rows("validation", rare)
    chosen = fit_bag_of_words(train, validation, "assistant").variant
    assert (chosen.c, chosen.validation_auroc) == (100.0, 1.0)
    monkeypatch.setattr("eval.bag_of_words.baseline.STRENGTHS", STRENGTHS[:3])
    weaker = fit_bag_of_words(train, validation, "assistant").variant
    assert weaker.validation_auroc < 1.0


def test_the_weights_are_those_of_the_variant_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weakest strength is enough and comes first; others are fitted after it."""
    train, validation = rows("train", only), rows("validation", only)
    fitted = fit_bag_of_words(train, validation, "assistant")
    assert fitted.variant.c == STRENGTHS[0]
    monkeypatch.setattr("eval.bag_of_words.baseline.STRENGTHS", STRENGTHS[:1])
    alone = fit_bag_of_words(train, validation, "assistant")
    assert np.abs(fitted.model.coef_ - alone.model.coef_).max() < 1e-6
    assert [answer.logit for answer in fitted.answers(validation)] == pytest.approx(
        [answer.logit for answer in alone.answers(validation)], abs=1e-6
    )


def test_the_threshold_keeps_to_the_rule_s_largest_false_positive_rate() -> None:
    def mostly(label: int, noise: list[str]) -> list[Message]:
        return judged(label if noise[2][0] != "g" else 1 - label, noise)

    train, validation = rows("train", mostly, 200), rows("validation", mostly, 200)
    found = []
    for max_fpr in (0.02, 0.3):
        fitted = fit_bag_of_words(train, validation, "assistant", max_fpr)
        answers = fitted.answers(validation)
        flagged = {0: 0, 1: 0}
        for answer, row in zip(answers, validation, strict=True):
            flagged[row.label] += bool(answer.violates)
        assert flagged[0] <= max_fpr * len(validation) / 2
        found.append(flagged[1])
    assert 0 < found[0] < found[1]


def test_rows_that_nothing_can_be_fitted_on_are_refused() -> None:
    validation = rows("validation", early)
    with pytest.raises(GuardError, match=r"rows have one label.*got 1 rows"):
        fit_bag_of_words(rows("train", early, 1), validation, "assistant")
    silent = rows("train", lambda label, noise: [Message("user", "?!")])
    with pytest.raises(GuardError, match="no words that differ"):
        fit_bag_of_words(silent, validation, "assistant")


def test_beside_generated_rows_the_last_fit_reads_your_own_validation_rows_too() -> None:
    def own(row: Example) -> Example:
        return dataclasses.replace(row, id=f"own-{row.id}", group=f"own-{row.id}", source="mine")

    generated = rows("train", only), rows("validation", only)
    train = [dataclasses.replace(row, source=GENERATOR) for row in generated[0]]
    held_out = [dataclasses.replace(row, source=GENERATOR) for row in generated[1]]
    mine = [own(row) for row in rows("validation", judged)]
    fitted = fit_bag_of_words(train, [*held_out, *mine], "assistant")
    # Of the training rows' words it would know none of the own rows'.
    assert fitted.blocks[0].transform(["beba"]).shape[1] > 2
    without = fit_bag_of_words(train, held_out, "assistant")
    assert without.blocks[0].transform(["beba"]).shape[1] == 2
    assert without.variant.c == fitted.variant.c
