"""Every view of a conversation earns its place, and the choice is one of the validation rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from pytest import MonkeyPatch

from eval.answers import Answer
from eval.bag_of_words import NGRAMS, STRENGTHS, VIEWS, BagVariant, fit_bag_of_words, text_of
from guard.conversation.example import GENERATOR, Example, Message, Split
from guard.errors import GuardError
from guard.rule import Reads

NOISE = [f"{first}{second}" for first, second in itertools.product("bcdfgh", "aeiou")]


def rows(
    split: Split, turns: Callable[[int, list[str]], list[Message]], n: int = 60
) -> list[Example]:
    """Rows of alternating labels; `turns` writes one from its label and some noise."""
    rng = np.random.default_rng(len(split))
    made = []
    for number in range(n):
        name, label = f"{split}{number}", number % 2
        said = tuple(turns(label, rng.choice(NOISE, 3).tolist()))
        made.append(Example(name, "toy", said, label, split, "toy", name))
    return made


def chosen_on(turns: Callable[[int, list[str]], list[Message]]) -> BagVariant:
    """The variant of a rule on the assistant."""
    train, validation = rows("train", turns), rows("validation", turns)
    return fit_bag_of_words(train, validation, "assistant").variant


def early(label: int, noise: list[str]) -> list[Message]:
    """The user's first turn tells; the assistant, who is judged, and the last turn do not."""
    word = ("plain", "secret")[label]
    return [
        Message("user", f"{noise[0]} {word}"),
        Message("assistant", f"{noise[1]} {noise[2]}"),
        Message("user", noise[0]),
    ]


def judged(label: int, noise: list[str]) -> list[Message]:
    """The assistant's first turn tells; others say the same words at random, and last."""
    word, decoy = ("plain", "secret")[label], ("plain", "secret")[noise[0] < "d"]
    return [
        Message("user", f"{decoy} {decoy} {decoy}"),
        Message("assistant", f"{noise[1]} {word}"),
        Message("assistant", noise[0]),
        Message("user", f"{decoy} {noise[2]}"),
    ]


def last(label: int, noise: list[str]) -> list[Message]:
    """The assistant's last turn tells; his first says the same words at random."""
    word, decoy = ("plain", "secret")[label], ("plain", "secret")[noise[0] < "d"]
    return [
        Message("assistant", f"{decoy} {decoy} {decoy}"),
        Message("user", decoy),
        Message("assistant", f"{noise[1]} {word}"),
    ]


def only(label: int, noise: list[str]) -> list[Message]:
    """One turn that tells: every view is the same, and every strength is enough."""
    return [Message("assistant", ("plain", "secret")[label])]


def right(examples: list[Example], answers: list[Answer]) -> float:
    """The share of right answers."""
    rows = zip(examples, answers, strict=True)
    return float(np.mean([answer.violates == bool(row.label) for row, answer in rows]))


@pytest.mark.parametrize(
    ("view", "turns"),
    [("whole conversation", early), ("judged speaker", judged), ("last turn", last)],
)
def test_the_view_that_tells_is_chosen_and_without_it_the_baseline_is_worse(
    view: str, turns: Callable[[int, list[str]], list[Message]], monkeypatch: MonkeyPatch
) -> None:
    train, validation = rows("train", turns), rows("validation", turns)
    fitted = fit_bag_of_words(train, validation, "assistant")
    assert (fitted.variant.view, fitted.variant.validation_auroc) == (view, 1.0)
    test = rows("test", turns)
    assert right(test, fitted.answers(test)) > 0.9
    monkeypatch.delitem(VIEWS, view)
    assert chosen_on(turns).validation_auroc < 1.0


def test_the_first_of_equals_is_chosen_with_its_own_weights(monkeypatch: MonkeyPatch) -> None:
    """The weakest strength is enough and comes first; others are fitted after it."""
    train, validation = rows("train", only), rows("validation", only)
    fits = [fit_bag_of_words(train, validation, "assistant") for _ in range(2)]
    assert fits[0].variant.c == STRENGTHS[0]
    assert fits[0].variant.ngrams == next(iter(NGRAMS))
    assert fits[0].answers(validation) == fits[1].answers(validation)
    monkeypatch.setattr("eval.bag_of_words.STRENGTHS", STRENGTHS[:1])
    alone = fit_bag_of_words(train, validation, "assistant")
    assert np.abs(fits[0].model.coef_ - alone.model.coef_).max() < 1e-6


def parts(label: int, noise: list[str]) -> list[Message]:
    """Words that occur once; their middles tell."""
    return [Message("assistant", f"{''.join(noise)}{('xkq', 'zvw')[label]}{noise[0]}{noise[1]}")]


def test_parts_of_words_tell_where_no_word_comes_twice() -> None:
    chosen = chosen_on(parts)
    assert chosen.ngrams == "words 1-2 and characters 2-5" and chosen.validation_auroc == 1.0


def rare(label: int, noise: list[str]) -> list[Message]:
    """A rare word tells; a common one agrees with it in two of three rows."""
    first = noise[0]
    agrees = first[0] in "bcdf"
    common = ("often", "seldom")[label if agrees else 1 - label]
    return [Message("assistant", f"{common} {common} {common} {first}{'xy'[label]}")]


def test_a_strength_lets_rare_words_outweigh_a_common_one(monkeypatch: MonkeyPatch) -> None:
    """C = 100 won on 12 of 15 shipped rules, 1,000 on none: docs/lessons.md."""
    chosen = chosen_on(rare)
    assert (chosen.c, chosen.validation_auroc) == (100.0, 1.0)
    monkeypatch.setattr("eval.bag_of_words.STRENGTHS", STRENGTHS[:3])
    assert chosen_on(rare).validation_auroc < 1.0


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


@pytest.mark.parametrize(
    ("reads", "judged_speaker", "last_turn"),
    [
        ("user", "b", "b"),
        ("assistant", "c\ne", "e"),
        ("tool", "a\nd", "d"),  # a system's turn may hold a document, as what tools return
        ("last tool", "a\nd", "d"),
        ("conversation", "a\nb\nc\nd\ne", "e"),
    ],
)
def test_views_read_what_they_say(reads: Reads, judged_speaker: str, last_turn: str) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant")
    turns = [Message(role, text) for role, text in zip(roles, "abcde", strict=True)]
    (row,) = rows("test", lambda label, noise: turns, 1)
    read = {view: text_of(row, view, reads) for view in VIEWS}
    assert list(read) == ["whole conversation", "judged speaker", "last turn"]
    assert list(read.values()) == ["a\nb\nc\nd\ne", judged_speaker, last_turn]


def test_what_hides_text_is_undone_before_it_is_counted() -> None:
    hidden = Message("user", "d\u200bo\u200bse \uff41\uff42\uff43")
    (row,) = rows("test", lambda label, noise: [hidden], 1)
    assert text_of(row, "whole conversation", "user") == "dose abc"
