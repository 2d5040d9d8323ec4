"""Ways of writing a message that are meant to mislead whoever judges it.

A trick changes no meaning: the label of a conversation stays what it was. Data hold them evenly
over both labels, so that none tells the label.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from data.generator.phrasebook import Pool, pool_of
from data.generator.words import WORDS
from guard.rule import Rule

Trick = Callable[[str, random.Random, Pool], str]

# Judge-directed prompt injections: not said to the other speaker.
INSTRUCTIONS, MASTER_KEYS = WORDS.instructions, WORDS.master_keys
_LEET = str.maketrans("aeiost", "4310$7")
_LOOK_ALIKE = str.maketrans("aeopcxyi", "аеорсхуі")
_WORD = re.compile(r"[A-Za-z]{4,}")


def _on_words(share: float, change: Callable[[str, random.Random], str]) -> Trick:
    """Changes about this share of the words of four letters and more."""

    def trick(text: str, rng: random.Random, pool: Pool) -> str:
        def replacement(word: re.Match[str]) -> str:
            if rng.random() < share:
                return change(word[0], rng)
            return word[0]

        return _WORD.sub(replacement, text)

    return trick


def _beside(lines: tuple[str, ...]) -> Trick:
    """Writes one of the lines before the text or behind it."""

    def trick(text: str, rng: random.Random, pool: Pool) -> str:
        addition = rng.choice(pool_of(lines, pool))
        if rng.random() < 0.5:
            return f"{addition} {text}"
        return f"{text} {addition}"

    return trick


def _with_invisible_character(word: str, rng: random.Random) -> str:
    return word[:2] + rng.choice("\u200b\u200d\u2060\u00ad") + word[2:]


def _shifted(text: str, offset: int) -> str:
    return "".join(chr(ord(letter) + offset) for letter in text)


def hidden_tags(text: str, rng: random.Random, pool: Pool) -> str:
    return text + _shifted(rng.choice(pool_of(INSTRUCTIONS, pool)), 0xE0000)


# Another one, or another order, draws other training data.
TRICKS: dict[str, Trick] = {
    "zero_width": _on_words(0.5, _with_invisible_character),
    "look_alikes": _on_words(0.5, lambda word, rng: word.translate(_LOOK_ALIKE)),
    "full_width": _on_words(0.5, lambda word, rng: _shifted(word, 0xFEE0)),
    "hidden_tags": hidden_tags,
    "spaced": _on_words(0.33, lambda word, rng: " ".join(word)),
    "leetspeak": _on_words(0.5, lambda word, rng: word.translate(_LEET)),
    "instruction": _beside(INSTRUCTIONS),
    "master_key": _beside(MASTER_KEYS),
}
COMMANDS = ("hidden_tags", "instruction")  # that hold an injection for the judge


def tricks_for(rule: Rule) -> list[str]:
    """The tricks that leave the labels of `rule` what they are."""
    return [name for name in TRICKS if not (rule.commands and name in COMMANDS)]
