"""Rows with one long turn: the deciding turn amid other text, or a tool's long result before it.

A rule that was trained on short turns alone reads a long one badly, and says so with confidence.
The added text changes no label: it is of allowed rows, or made-up records. A rule that depends on
context gets only a tool's long result, and only of records.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from guard.conversation.example import LONG_TURN, Example, Message
from guard.rule import SPEAKERS, Rule

LONGEST = 16_000  # characters of a long turn
SHARE = 0.05  # of the training rows, as many again are written with a long turn

# Where the turn that decides stands in its long turn, or `before`: behind the long one.
Position = Literal["start", "middle", "end", "before"]
LONG_TURN_KEY = "long_turn"  # of a copy's `meta`
POSITIONS: tuple[Position, ...] = get_args(Position)
_STATES = ("open", "paid", "shipped", "returned", "on hold", "closed")


class LongTurns:
    """Writes rows of `rule` with a long turn, amid `texts` of each role."""

    def __init__(self, rule: Rule, texts: Mapping[str, Sequence[str]]) -> None:
        self._rule, self._texts = rule, texts

    @classmethod
    def amid_allowed(cls, rule: Rule, examples: Sequence[Example]) -> LongTurns:
        texts: dict[str, list[str]] = {}
        allowed = []
        if not rule.depends_on_context:
            allowed = [row for row in examples if not row.label]
        for message in itertools.chain.from_iterable(row.messages for row in allowed):
            texts.setdefault(message.role, []).append(message.content)
        return cls(rule, texts)

    @property
    def positions(self) -> tuple[Position, ...]:
        if self._rule.depends_on_context:
            return ("before",)
        return POSITIONS

    def written(
        self, example: Example, position: Position, characters: int, rng: random.Random
    ) -> Example | None:
        """The row with a turn of about so many `characters`; None where nothing in it decides."""
        index = _deciding(example, self._rule)
        if index is None:
            return None
        messages = list(example.messages)
        turn = messages[index]
        room = characters - len(turn.content)
        if position == "before":
            messages.insert(index, Message(self._role_before(), self._result(characters, rng)))
        else:
            pieces = self._pieces(turn.role, room, rng)
            cut = {"start": 0, "middle": len(pieces) // 2, "end": len(pieces)}[position]
            separator = rng.choice((" ", "\n\n"))
            content = separator.join([*pieces[:cut], turn.content, *pieces[cut:]])
            messages[index] = Message(turn.role, content)
        longest = max(len(message.content) for message in messages)
        return replace(
            example,
            id=f"{example.id}/{position}/{characters}",
            messages=tuple(messages),
            meta=example.meta | {LONG_TURN_KEY: {"position": position, "characters": longest}},
        )

    def _role_before(self) -> str:
        """Who has the long turn before the one that decides: nobody judged, if it can be."""
        judged = SPEAKERS[self._rule.reads]
        if "tool" in judged and "user" not in judged:
            return "user"
        return "tool"

    def _result(self, characters: int, rng: random.Random) -> str:
        """A long result: records, or what was said in other conversations."""
        texts = list(itertools.chain.from_iterable(self._texts.values()))
        if not texts or rng.random() < 0.5:
            return "\n".join(_records(characters, rng))
        return "\n".join(_filled(texts, characters, rng))

    def _pieces(self, role: str, characters: int, rng: random.Random) -> list[str]:
        texts = self._texts.get(role)
        if not texts:
            return _records(characters, rng)
        return _filled(texts, characters, rng)


def with_long_turns(examples: Sequence[Example], rule: Rule, seed: int) -> list[Example]:
    """The examples, and copies of training rows with a long turn, as many of either label."""
    rng = random.Random(f"{rule.id}/{seed}/long turns")
    training = [example for example in examples if example.split == "train"]
    writer = LongTurns.amid_allowed(rule, training)
    copies: list[Example] = []
    for label in (0, 1):
        candidates = [example for example in training if example.label == label]
        wanted = min(len(candidates), math.ceil(SHARE * len(training) / 2))
        for example in rng.sample(candidates, wanted):
            copy = writer.written(example, rng.choice(writer.positions), long_length(rng), rng)
            if copy is not None:
                copies.append(copy)
    return [*examples, *copies]


def long_length(rng: random.Random) -> int:
    """The characters of a long turn: as often in every octave from LONG_TURN to LONGEST."""
    return round(math.exp(rng.uniform(math.log(LONG_TURN), math.log(LONGEST))))


def _deciding(example: Example, rule: Rule) -> int | None:
    """The number of the turn that the label is about; None where nobody judged speaks."""
    performed = f"{rule.id}/{example.meta.get('act')}"
    acts = example.meta.get("acts", ()) if example.is_generated else ()
    for index, act in enumerate(acts[: len(example.messages)]):
        if act == performed:
            return index
    judged: int | None = None
    for index, message in enumerate(example.messages):
        if message.role in SPEAKERS[rule.reads] and message.content:
            judged = index
    return judged


def _filled(texts: Sequence[str], characters: int, rng: random.Random) -> list[str]:
    """Texts in random order, of so many characters together or a little more."""
    pieces: list[str] = []
    while characters > 0:
        for text in rng.sample(texts, min(len(texts), 100)):
            pieces.append(text)
            characters -= len(text) + 1
            if characters <= 0:
                break
    return pieces


def _records(characters: int, rng: random.Random) -> list[str]:
    lines: list[str] = []
    while characters > 0:
        record = {
            "id": rng.randint(1_000, 999_999),
            "status": rng.choice(_STATES),
            "total": rng.randint(100, 99_999) / 100,
            "updated": f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        }
        lines.append(json.dumps(record))
        characters -= len(lines[-1]) + 1
    return lines
