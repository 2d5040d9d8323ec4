"""How a speaker writes: an utterance in a text register.

A register keeps numbers and addresses as they are. Contractions that stand before their subject
("won't you") are not written out, because "will not you" is no English.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from data.generator.grammar import tidy
from data.generator.words import WORDS

Register = Callable[[str, random.Random], str]


def formal(text: str, rng: random.Random) -> str:
    for pattern, full in WORDS.registers["expand"].items():
        text = re.sub(pattern, full, text, flags=re.IGNORECASE)
    return text[:1].upper() + text[1:]


def relaxed(text: str, rng: random.Random) -> str:
    for pattern, short in WORDS.registers["contract"].items():
        text = re.sub(pattern, short, text)
    return text


def casual(text: str, rng: random.Random) -> str:
    text = text[:1].lower() + text[1:]
    for pattern, short in WORDS.registers["chat"].items():
        if rng.random() < 0.5:
            text = re.sub(pattern, short, text)
    return text.rstrip(".")


def typos(text: str, rng: random.Random) -> str:
    """Swaps or drops letters in a word of twelve; numbers and addresses stay right."""

    def mistype(match: re.Match[str]) -> str:
        word = match[0]
        if rng.random() > 0.08:
            return word
        start = rng.randint(1, len(word) - 3)
        mistyped = word[start + 1]
        if rng.random() < 0.6:
            mistyped += word[start]
        return word[:start] + mistyped + word[start + 2 :]

    return re.sub(r"(?<![\w@.])[a-z]{5,}(?![\w@])", mistype, text)


def as_written(text: str, rng: random.Random) -> str:
    return re.sub(r" {2,}", " ", text).strip()


def lower(text: str, rng: random.Random) -> str:
    text = re.sub(r"[.,;:!\"]+(?=\s|$)", "", tidy(text).lower())
    if rng.random() < 0.5:
        text = text.replace("'", "")
    return text


def loud(text: str, rng: random.Random) -> str:
    return tidy(text).upper().rstrip(".") + rng.choice(("", "!", "!!", "!!!"))


def neutral(text: str, rng: random.Random) -> str:
    return text


def tidied(register: Register) -> Register:
    return lambda text, rng: register(tidy(text), rng)


USER_REGISTERS: dict[str, Register] = {
    "neutral": neutral,
    "formal": formal,
    "casual": casual,
    "terse": relaxed,
    "typos": typos,
}
ASSISTANT_REGISTERS: dict[str, Register] = {
    "neutral": neutral,
    "formal": formal,
    "relaxed": relaxed,
}
EXCERPT_REGISTERS: dict[str, Register] = {
    "as_written": as_written,
    "neutral": tidied(neutral),
    "casual": tidied(casual),
    "typos": tidied(typos),
    "lower": lower,
    "loud": loud,
}
