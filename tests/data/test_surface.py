import random
import re
from dataclasses import replace

from data.surface import auroc_from_surface
from guard.example import Example, Message


def _toy(telling: bool) -> list[Example]:
    """Random words; in the telling version one word gives the label away."""
    rng = random.Random(0)
    words = [
        f"w{first}{second}" for first in "abcdefgh" for second in "abcdefgh"
    ]  # no digits: a near duplicate may differ in those
    rows = []
    for number in range(400):
        label = number % 2
        text = [*rng.sample(words, 15), "secret" if telling and label else "plain"]
        split = "train" if number < 240 else "validation" if number < 280 else "test"
        rows.append(
            Example(
                f"e{number}",
                "r",
                (Message("user", " ".join(text)),),
                label,
                split,
                "s",
                f"g{number}",
                {"stratum": "real"},
            )  # type: ignore[arg-type]
        )
    return rows


def test_the_bag_of_words_baseline_finds_a_telling_word_and_nothing_in_noise() -> None:
    assert auroc_from_surface(_toy(telling=True))["words"]["real"]["best"] > 0.95
    assert auroc_from_surface(_toy(telling=False))["words"]["real"]["words_naive_bayes"] < 0.65


def test_the_bag_of_words_baseline_reads_every_script() -> None:
    rows = [
        replace(e, messages=(Message("user", e.messages[0].content.replace("secret", "тайна")),))
        for e in _toy(telling=True)
    ]
    only = [
        replace(
            e, messages=(Message("user", re.sub("[a-z ]", "", e.messages[0].content) or "просто"),)
        )
        for e in rows
    ]
    assert auroc_from_surface(only)["words"]["real"]["best"] == 1.0


def test_the_bag_of_words_baseline_finds_a_longer_label() -> None:
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
        for e in _toy(telling=False)
    ]
    surface = auroc_from_surface(rows)
    assert surface["length"] > 0.95
    assert surface["turns"] == 1.0
