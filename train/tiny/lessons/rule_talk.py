"""Conversations written from the served rules' own phrase books, with questions about single acts
in them.

A small base has to know what is said before an adapter can find it: an aLoRA reads the base's keys
and values and changes none of them. Only the phrasings seen in training are written (`pool_of`),
and never a rule's own question is asked. Knows nothing of models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.generator.dimensions import Dimensions, sample_dimensions
from data.generator.library import load_corpus
from data.generator.phrasebook import Corpus
from data.generator.writer import Writer
from guard.conversation.example import Example, Message
from guard.prompt.text import visible
from guard.rule import Rule
from train.tiny.lessons.situations import FORBIDS, WHO, ActLabel, RuleQuestion

QUESTIONS = 8  # a conversation
TOKENS_PER_WORD = 1.3
# Tokens of conversation for each act of this or of another rule that is not the target.
ROOM_FOR_AN_ACT = 60
OTHER = "other"  # a turn that is no act of any book
SPEAKERS = {**WHO, "tool": ("The tool", "A tool", "The tool's output")}
ACT_ATTEMPTS = 40  # draws of an act that nobody performs

PerformedAct = tuple[str, str]  # the role that performs it, and `rule/act`


@dataclass(frozen=True)
class LessonDraft:
    """A conversation, questions about it (none: those of retrieval), and the acts of each
    message.
    """

    messages: list[Message]
    questions: list[RuleQuestion]
    act_labels: list[list[ActLabel]]


class RuleTalk:
    """Writes contrast pairs of `rules`, each with the acts of the others as distractors, as `make
    data` does.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        corpora = [load_corpus(rule, rules) for rule in rules]
        self._writers = [Writer(corpus, "seen") for corpus in corpora]
        self._dimensions = [
            sample_dimensions(corpus, 1000, random.Random(corpus.rule.id)) for corpus in corpora
        ]
        self._acts = [_acts_of(corpus) for corpus in corpora]
        self.acts: tuple[str, ...] = (OTHER,)
        for acts in self._acts:
            self.acts += tuple(name for _, name in acts)

    def pair(self, words: int, rng: random.Random) -> list[LessonDraft]:
        """Two conversations of at most about `words` words that differ in one act, with their
        questions.
        """
        book = rng.randrange(len(self._writers))
        dimensions = self._drawn_dimensions(book, words, rng)
        examples = self._writers[book].group(dimensions, "train", f"base/{rng.random()}")
        return [self._draft(example, book, rng) for example in examples]

    def _drawn_dimensions(self, book: int, words: int, rng: random.Random) -> Dimensions:
        """Dimensions of the rule's own, with a length, and as many other acts as that has room
        for.
        """
        tokens = round(words * TOKENS_PER_WORD * rng.uniform(0.4, 1.0))
        drawn = rng.choice(self._dimensions[book])
        severity = drawn.severity
        if severity == "buried" and tokens <= 110:
            severity = "plain"
        hard_negatives = rng.randint(0, tokens // ROOM_FOR_AN_ACT)
        distractors = 0
        if not self._writers[book].corpus.rule.depends_on_context:
            distractors = rng.randint(0, tokens // ROOM_FOR_AN_ACT)
        return replace(
            drawn,
            target_tokens=tokens,
            severity=severity,
            hard_negatives=hard_negatives,
            distractors=distractors,
        )

    def _draft(self, example: Example, book: int, rng: random.Random) -> LessonDraft:
        messages = [
            replace(message, content=visible(message.content)) for message in example.messages
        ]
        performed: list[PerformedAct] = []
        act_labels: list[list[ActLabel]] = []
        for message, act in zip(messages, example.meta["acts"], strict=True):
            if act:
                performed.append((message.role, act))
            act_labels.append(_labels(message, act))
        questions = [self._question(performed, book, rng) for _ in range(QUESTIONS)]
        return LessonDraft(messages, questions, act_labels)

    def _question(
        self, performed: Sequence[PerformedAct], book: int, rng: random.Random
    ) -> RuleQuestion:
        """A rule about one act, violated half of the time; a quarter of the others name an act of
        the wrong speaker.
        """
        if performed and rng.random() < 0.5:
            role, act = rng.choice(performed)
            return _question_on(role, act, 1, rng)
        present = {(role, _name(act)) for role, act in performed}
        for _ in range(ACT_ATTEMPTS):
            role, act = self._other_act(performed, book, rng)
            if (role, _name(act)) not in present:
                break
        return _question_on(role, act, int((role, _name(act)) in present), rng)

    def _other_act(
        self, performed: Sequence[PerformedAct], book: int, rng: random.Random
    ) -> PerformedAct:
        """An act that is likely absent: one of the conversation by another speaker, or one of a
        book.
        """
        if performed and rng.random() < 0.25:
            speaker, act = rng.choice(performed)
            roles = [role for role in ("user", "assistant") if role != speaker]
            return rng.choice(roles), act
        if rng.random() >= 0.7:
            book = rng.randrange(len(self._acts))
        return rng.choice(self._acts[book])


def _acts_of(corpus: Corpus) -> list[PerformedAct]:
    acts = corpus.book.acts.items()
    return [(act.speaker, f"{corpus.rule.id}/{name}") for name, act in acts]


def _labels(message: Message, act: str | None) -> list[ActLabel]:
    if message.role == "system":
        return []
    return [ActLabel(message.content, act or OTHER, None, None)]


def _name(act: str) -> str:
    return act.rpartition("/")[2].replace("_", " ")


def _question_on(role: str, act: str, label: int, rng: random.Random) -> RuleQuestion:
    speaker = rng.choice(SPEAKERS[role])
    forbids = rng.choice(FORBIDS).format(act=_name(act))
    return RuleQuestion(f"{speaker} {forbids}.", label)
