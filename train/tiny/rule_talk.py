"""Conversations written from the served rules' own phrase books, with questions about single acts in them.

A small base has to know what is said before an adapter can find it: an aLoRA reads the base's keys and values and changes none of
them. Only the phrasings seen in training are written (`pool_of`), and never a rule's own question is asked. Knows nothing of models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from data.generator.dimensions import sample_dimensions
from data.generator.library import load_corpus
from data.generator.writer import Writer
from guard.example import Message
from guard.rule import Rule
from guard.text import visible
from train.tiny.situations import FORBIDS, WHO, Heard, Question

QUESTIONS = 8  # a conversation
TOKENS_PER_WORD = 1.3
ROOM_FOR_AN_ACT = (
    60  # tokens of conversation for each act of this or of another rule that is not the target
)
OTHER = "other"  # a turn that is no act of any book
SPEAKERS = {**WHO, "tool": ("The tool", "A tool", "The tool's output")}


class RuleTalk:
    """Writes contrast pairs of `rules`, each with the acts of the others as distractors, as `make data` does."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        corpora = [load_corpus(rule, rules) for rule in rules]
        self._writers = [Writer(corpus, "seen") for corpus in corpora]
        self._dimensions = [
            sample_dimensions(corpus, 1000, random.Random(corpus.rule.id)) for corpus in corpora
        ]
        self._performed = [
            [(act.speaker, f"{corpus.rule.id}/{name}") for name, act in corpus.book.acts.items()] for corpus in corpora
        ]  # fmt: skip
        self.acts = (OTHER, *(act for book in self._performed for _, act in book))

    def pair(
        self, words: int, rng: random.Random
    ) -> list[tuple[list[Message], list[Question], list[list[Heard]]]]:
        """Two conversations of at most about `words` words that differ in one act, their questions, and the act of each message."""
        book = rng.randrange(len(self._writers))
        writer = self._writers[book]
        tokens = round(words * TOKENS_PER_WORD * rng.uniform(0.4, 1.0))
        drawn = rng.choice(self._dimensions[book])
        dimensions = replace(
            drawn,
            target_tokens=tokens,
            severity=drawn.severity if tokens > 110 or drawn.severity != "buried" else "plain",
            hard_negatives=rng.randint(0, tokens // ROOM_FOR_AN_ACT),
            distractors=rng.randint(0, tokens // ROOM_FOR_AN_ACT)
            if writer.corpus.book.wanders
            else 0,
        )
        written = []
        for example in writer.group(dimensions, "train", f"base/{rng.random()}"):
            messages = [
                replace(message, content=visible(message.content)) for message in example.messages
            ]
            acts = example.meta["acts"]
            heard = [
                [Heard(message.content, act or OTHER, None, None)]
                if message.role != "system"
                else []
                for message, act in zip(messages, acts, strict=True)
            ]
            said = [(message.role, act) for message, act in zip(messages, acts, strict=True) if act]
            written.append(
                (messages, [self._question(said, book, rng) for _ in range(QUESTIONS)], heard)
            )
        return written

    def _question(self, said: Sequence[tuple[str, str]], book: int, rng: random.Random) -> Question:
        """A rule about one act, violated half of the time; a quarter of the others name an act of the wrong speaker."""
        present = {(role, _name(act)) for role, act in said}
        if said and rng.random() < 0.5:
            role, act = rng.choice(said)
            return _asked(role, act, 1, rng)
        for _ in range(40):
            if said and rng.random() < 0.25:
                speaker, act = rng.choice(said)
                role = rng.choice([other for other in ("user", "assistant") if other != speaker])
            else:
                role, act = rng.choice(
                    self._performed[
                        book if rng.random() < 0.7 else rng.randrange(len(self._performed))
                    ]
                )
            if (role, _name(act)) not in present:
                break
        return _asked(role, act, int((role, _name(act)) in present), rng)


def _name(act: str) -> str:
    return act.rpartition("/")[2].replace("_", " ")


def _asked(role: str, act: str, label: int, rng: random.Random) -> Question:
    return Question(
        f"{rng.choice(SPEAKERS[role])} {rng.choice(FORBIDS).format(act=_name(act))}.", label
    )
