"""Every view of a conversation earns its place, and the choice is one of the validation rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from eval.bag_of_words import NGRAMS, STRENGTHS, VIEWS, BagOfWords, fit_bag_of_words, text_of
from guard.conversation.example import GENERATOR, Example, Message, Split
from guard.errors import GuardError
from guard.rule import Reads, Rule

NOISE = [f"{first}{second}" for first, second in itertools.product("bcdfgh", "aeiou")]

Turns = Callable[[int, list[str]], list[Message]]
TEXTS: dict[str, Any] = {"id": "toy", "title": "Nothing rude", "policy": "Say nothing rude."}
RULE = Rule(**TEXTS, judged="assistant", violates=("rude",), allows=("kind",))


def rows(split: Split, turns: Turns, n: int = 60) -> list[Example]:
    """Rows of alternating labels; `turns` writes one from its label and some noise."""
    rng = np.random.default_rng(len(split))
    made = []
    for number in range(n):
        name, label = f"{split}{number}", number % 2
        said = tuple(turns(label, rng.choice(NOISE, 3).tolist()))
        made.append(Example(name, "toy", said, label, split, "toy", name))
    return made


def fitted_on(turns: Turns) -> BagOfWords:
    """The baseline of a rule on the assistant."""
    return fit_bag_of_words(rows("train", turns), rows("validation", turns), RULE)


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


@pytest.mark.parametrize(
    ("view", "turns"),
    [("whole conversation", early), ("judged speaker", judged), ("last turn", last)],
)
def test_the_view_that_tells_is_chosen_and_without_it_the_baseline_is_worse(
    view: str, turns: Turns, monkeypatch: MonkeyPatch
) -> None:
    fitted, test = fitted_on(turns), rows("test", turns)
    assert (fitted.variant.view, fitted.variant.validation_auroc) == (view, 1.0)
    pairs = zip(test, fitted.answers(test), strict=True)
    assert np.mean([answer.violates == bool(row.label) for row, answer in pairs]) > 0.9
    monkeypatch.delitem(VIEWS, view)
    assert fitted_on(turns).variant.validation_auroc < 1.0


def test_the_first_of_equals_is_chosen() -> None:
    """The weakest strength is enough and comes first."""
    chosen = fitted_on(only).variant
    assert (chosen.c, chosen.ngrams) == (STRENGTHS[0], next(iter(NGRAMS)))


def parts(label: int, noise: list[str]) -> list[Message]:
    """Words that occur once; their middles tell."""
    return [Message("assistant", f"{''.join(noise)}{('xkq', 'zvw')[label]}{noise[0]}{noise[1]}")]


def rare(label: int, noise: list[str]) -> list[Message]:
    """A rare word tells; a common one agrees with it in two of three rows."""
    first = noise[0]
    common = ("often", "seldom")[label if first[0] in "bcdf" else 1 - label]
    return [Message("assistant", f"{common} {common} {common} {first}{'xy'[label]}")]


def test_parts_of_words_and_rare_ones_tell_by_ngrams_and_strength(monkeypatch: MonkeyPatch) -> None:
    """C = 100 won on 12 of 15 shipped rules, 1,000 on none: docs/lessons.md."""
    chosen = fitted_on(parts).variant
    assert chosen.ngrams == "words 1-2 and characters 2-5" and chosen.validation_auroc == 1.0
    chosen = fitted_on(rare).variant
    assert (chosen.c, chosen.validation_auroc) == (100.0, 1.0)
    monkeypatch.setattr("eval.bag_of_words.STRENGTHS", STRENGTHS[:3])
    assert fitted_on(rare).variant.validation_auroc < 1.0
    with pytest.raises(GuardError, match="no words that differ"):
        fitted_on(lambda label, noise: [Message("user", "?!")])


def test_beside_generated_rows_the_last_fit_reads_your_own_validation_rows_too() -> None:
    train = [dataclasses.replace(row, source=GENERATOR) for row in rows("train", only)]
    held_out = [dataclasses.replace(row, source=GENERATOR) for row in rows("validation", only)]
    mine = []
    for row in rows("validation", judged):
        mine.append(dataclasses.replace(row, id=f"own-{row.id}", group=f"own-{row.id}"))
    fitted = fit_bag_of_words(train, [*held_out, *mine], RULE)
    # Of the training rows' words it would know none of the own rows'.
    assert fitted.blocks[0].transform(["beba"]).shape[1] > 2
    without = fit_bag_of_words(train, held_out, RULE)
    assert without.blocks[0].transform(["beba"]).shape[1] == 2
    assert without.variant.c == fitted.variant.c


@pytest.mark.parametrize(
    ("reads", "judged_speaker", "last_turn"),
    [
        ("assistant", "c\ne", "e"),
        ("tool", "a\nd", "d"),  # a system's turn may hold a document, as what tools return
        ("conversation", "a\nbB\nc\nd\ne", "e"),
    ],
)
def test_views_read_what_they_say_and_undo_what_hides_text(
    reads: Reads, judged_speaker: str, last_turn: str
) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant")
    texts = ("a", "b\u200b\uff22", "c", "d", "e")
    turns = [Message(role, text) for role, text in zip(roles, texts, strict=True)]
    (row,) = rows("test", lambda label, noise: turns, 1)
    read = {view: text_of(row, view, reads) for view in VIEWS}
    assert list(read) == ["whole conversation", "judged speaker", "last turn"]
    assert list(read.values()) == ["a\nbB\nc\nd\ne", judged_speaker, last_turn]
