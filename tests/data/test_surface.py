import re
from dataclasses import replace

from data.surface import auroc_from_surface
from guard.conversation.example import Example, Message
from tests.data.random_words import rows_of_random_words


def test_surface_words_find_a_telling_word_and_nothing_in_noise() -> None:
    assert auroc_from_surface(rows_of_random_words(telling=True))["words"]["real"]["best"] > 0.95
    assert (
        auroc_from_surface(rows_of_random_words(telling=False))["words"]["real"][
            "words_naive_bayes"
        ]
        < 0.65
    )


def test_surface_words_read_every_script() -> None:
    rows = [
        replace(e, messages=(Message("user", e.messages[0].content.replace("secret", "тайна")),))
        for e in rows_of_random_words(telling=True)
    ]
    only = [
        replace(
            e, messages=(Message("user", re.sub("[a-z ]", "", e.messages[0].content) or "просто"),)
        )
        for e in rows
    ]
    assert auroc_from_surface(only)["words"]["real"]["best"] == 1.0


def test_surface_words_find_a_longer_label() -> None:
    rows = [
        Example(
            e.id,
            e.rule,
            (*e.messages, *([Message("assistant", "and more words")] if e.label else [])),
            e.label,
            e.split,
            e.source,
            e.group,
            e.meta,
        )
        for e in rows_of_random_words(telling=False)
    ]
    surface = auroc_from_surface(rows)
    assert surface["length"] > 0.95
    assert surface["turns"] == 1.0
