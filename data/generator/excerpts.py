"""Excerpts: short rows in the forms in which other people's conversations come.

A conversation of `writer.py` is a whole chat with one assistant. Real rows are often less: the end
of a chat, a forum's question with one answer, a document with a question about it. A rule may have
a book of such forms, `phrases/excerpts/RULE.yaml`; then one group in SHARE is an excerpt.

The `layouts` of an excerpt say who speaks, turn by turn, with one hole, `*`, in a turn of the
judged speaker. A pair has one layout and one set of slot values. The violating row's hole is filled
from `does`, the allowed row's from `allowed`. Where the rest of the row tells right from wrong,
both holes are filled from `either`: in the allowed row each `{land.?}` of its line is the layout's
`{land}`; in the violating row one of them is another land. All blocks are split into pools as an
act's cores are. `¦` stands for an upright bar and `¶` for a new line.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from data.generator import grammar
from data.generator.phrasebook import (
    STRATA,
    Corpus,
    DistinctLines,
    Pool,
    cores_of,
    line_id,
    slot_pool,
    turns_of,
)
from data.generator.registers import EXCERPT_REGISTERS
from data.generator.words import Lines
from guard.conversation.example import GENERATOR, Example, Message, Split
from guard.files.yaml_file import Strict
from guard.rule import SPEAKERS, Rule

HOLE = "*"
RIGHT_OR_WRONG = re.compile(r"\{([a-z_]+)\.\?\}")  # a slot in a line of `either`
WRONG = ".5"  # the number of another value of that slot, which no layout has
SHARE = 3
STANCES = {1: "does", 0: "resembles"}  # by label


class Excerpt(Strict):
    """One form: `either`, or `does` and `allowed`. A pair draws one register of each speaker."""

    layouts: DistinctLines
    does: DistinctLines = ()
    allowed: DistinctLines = ()
    either: DistinctLines = ()
    registers: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    def fillings(self, label: int) -> Lines:
        if self.either:
            return self.either
        if label:
            return self.does
        return self.allowed


class ExcerptBook(Strict):
    """The excerpts of one rule, and the values of their slots."""

    rule: str
    slots: dict[str, Lines]
    excerpts: dict[str, Excerpt]


class ExcerptWriter:
    """Writes the excerpts of one rule from one pool of lines."""

    def __init__(self, corpus: Corpus, book: ExcerptBook, pool: Pool) -> None:
        self.corpus, self.book, self.pool = corpus, book, pool
        self._slots = slot_pool(book.slots, pool)

    def group(self, name: str, split: Split, key: str) -> list[Example]:
        excerpt = self.book.excerpts[name]
        rng = random.Random(key)
        layout = rng.choice(excerpt.layouts)
        registers = {speaker: rng.choice(choices) for speaker, choices in excerpt.registers.items()}
        examples = []
        for label in (1, 0):
            if excerpt.either:
                rng = random.Random(f"{key}/either")  # both say the same but for a value
            core = rng.choice(cores_of(excerpt.fillings(label), self.pool))
            filling = _with_value_of(label, grammar.resolve(core, rng), rng)
            messages = self._messages(layout, filling, registers, key)
            meta = self._meta(name, label, core, filling, layout)
            if self.corpus.rule.turns == "last":
                end = _end_of_last_turn(messages, meta["acts"], self.corpus.rule)
                messages, meta["acts"] = messages[:end], meta["acts"][:end]
            examples.append(
                Example(
                    id=f"{key}/{label}",
                    rule=self.corpus.rule.id,
                    messages=messages,
                    label=label,
                    split=split,
                    source=GENERATOR,
                    group=key,
                    meta=meta,
                )
            )
        return examples

    def _messages(
        self, layout: str, filling: str, registers: dict[str, str], key: str
    ) -> tuple[Message, ...]:
        bindings = grammar.Bindings(self._slots, key)
        messages = []
        for index, (speaker, text) in enumerate(turns_of(layout, "user")):
            # One generator per turn, so that a pair's shared turns come out the same.
            rng = random.Random(f"{key}/{index}")
            template = grammar.resolve(text, rng).replace(HOLE, filling)
            register = EXCERPT_REGISTERS[registers.get(speaker, "as_written")]
            filled = re.sub(r" *¶ *", "\n", bindings.fill(template)).replace("¦", "|")
            messages.append(Message(speaker, register(filled, rng)))
        return tuple(messages)

    def _meta(self, name: str, label: int, core: str, filling: str, layout: str) -> dict[str, Any]:
        """What an excerpt was made from, named as in a conversation's row."""
        stance = STANCES[label]
        identity = f"{self.corpus.rule.id}/{name}_{stance}"
        acts: list[str | None] = []
        for _, text in turns_of(layout, "user"):
            acts.append(identity if HOLE in text else None)
        return {
            "excerpt": name,
            "stratum": STRATA[self.pool],
            "difficulty": "boundary",
            "violating_act": f"{name}_{STANCES[1]}",
            "allowed_act": f"{name}_{STANCES[0]}",
            "act": f"{name}_{stance}",
            "stance": stance,
            "acts": acts,
            "cores": [f"{identity}/{line_id(core)}"],
            "phrasings": [f"{identity}/{line_id(filling)}"],
        }


def _end_of_last_turn(messages: Sequence[Message], acts: Sequence[str | None], rule: Rule) -> int:
    """How many turns the row has: it ends before the judged speaker speaks after the filling."""
    filled = max(turn for turn, act in enumerate(acts) if act)
    for turn in range(filled + 1, len(messages)):
        if messages[turn].role in SPEAKERS[rule.reads]:
            return turn
    return len(messages)


def _with_value_of(label: int, filling: str, rng: random.Random) -> str:
    """The filling with the layout's values, one of them wrong in the violating row."""
    value_count = len(RIGHT_OR_WRONG.findall(filling))
    if label and value_count:
        for _ in range(rng.randrange(value_count)):
            filling = RIGHT_OR_WRONG.sub(r"{\1}", filling, count=1)
        filling = RIGHT_OR_WRONG.sub(rf"{{\1{WRONG}}}", filling, count=1)
    return right(filling)


def right(filling: str) -> str:
    """A filling with the layout's values alone: each `{land.?}` is `{land}`."""
    return RIGHT_OR_WRONG.sub(r"{\1}", filling)
