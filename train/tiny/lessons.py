"""What the student sees in one step: conversations, their turns' meanings, and rule questions with answers.

Real dialogues carry retrieval questions ("must not say anything like …", answered by the teacher's similarity), generated
situations and conversations from the served rules' phrase books carry questions about acts. Knows nothing of the student's weights.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from guard.example import Message
from train.tiny.corpus import Source, window
from train.tiny.rule_talk import RuleTalk
from train.tiny.situations import (
    ACTS,
    FORBIDS,
    NOBODY_FORBIDS,
    SALAD,
    WHO,
    Heard,
    Question,
    messages,
    question,
    situation,
)
from train.tiny.teacher import Teacher

QUESTIONS_PER_CONVERSATION = 6
RULE_TALK_SHARE = 0.6  # of the conversations, where phrase books are given
SITUATION_SHARE = 0.4  # of the others
SIMILAR, DISSIMILAR = (
    0.6,
    0.42,
)  # cosine to a turn: above = it says something like that; below = it does not
# (words a conversation, conversations a step, how often): about 4,000 tokens each.
SHAPES = ((80, 16, 0.6), (220, 9, 0.28), (800, 3, 0.12))
SAYS = (
    "say anything like: {said}",
    "say something that means: {said}",
    "express this: {said}",
    "talk about this: {said}",
    "say: {said}",
)


@dataclass(frozen=True)
class Lesson:
    """A conversation and what the teacher says of it.

    `turn_embeddings` `[turns, 384]`; `sentences`: each turn in sentences, empty for a turn of one; `sentence_embeddings`: of all of
    them, one after another, `[n, 384]`; questions, and the embedding of the first one's rule text `[384]`; of a generated
    conversation, what is heard in each message.
    """

    messages: list[Message]
    turn_embeddings: torch.Tensor
    sentences: list[list[str]]
    sentence_embeddings: torch.Tensor
    questions: list[Question]
    rule_embedding: torch.Tensor
    heard: list[list[Heard]] = field(default_factory=list)


Draft = tuple[list[Message], list[Question], list[list[Heard]]]  # no questions: those of retrieval


class Lessons:
    """Samples lessons. `pool` is a fixed set of real turns that retrieval questions quote."""

    def __init__(
        self,
        sources: Sequence[Source],
        words: Sequence[str],
        teacher: Teacher,
        *,
        rule_talk: RuleTalk | None = None,
        pool: int = 12_000,
        shapes: Sequence[tuple[int, int, float]] = SHAPES,
        seed: int = 0,
    ) -> None:
        self._teacher, self._words, self._shapes, self._rule_talk = (
            teacher,
            words,
            shapes,
            rule_talk,
        )
        self.acts = (*ACTS, *(rule_talk.acts if rule_talk else ()))
        self.digests = [source.digest for source in sources]
        self._sources = [source.conversations for source in sources]
        # Square root of the size: the largest corpus does not drown the others.
        self._weights = [
            sum(len(conversation) for conversation in source.conversations) ** 0.5
            for source in sources
        ]
        rng = random.Random(seed)
        turns = {
            message.content
            for source in sources
            for conversation in source.conversations
            for message in conversation
            if 4 <= len(message.content.split()) <= 40
        }
        self._pool = rng.sample(sorted(turns), min(pool, len(turns)))
        self._pool_embeddings = teacher.embed(self._pool, progress=True)

    def step(self, rng: random.Random) -> list[Lesson]:
        """The lessons of one optimizer step, all of similar length."""
        words, rows, _ = rng.choices(self._shapes, weights=[shape[2] for shape in self._shapes])[0]
        drafts: list[Draft] = []
        while len(drafts) < rows:
            drafts += (
                self._rule_talk.pair(words, rng)
                if self._rule_talk and rng.random() < RULE_TALK_SHARE
                else [self._draft(words, rng)]
            )
        turns = [message.content for conversation, _, _ in drafts for message in conversation]
        sentences = [
            [sentences_of(message.content) for message in conversation]
            for conversation, _, _ in drafts
        ]
        single = [
            sentence for conversation in sentences for turn in conversation for sentence in turn
        ]
        of_turns, of_sentences = self._teacher.embed(turns + single).split(
            [len(turns), len(single)]
        )
        embeddings = of_turns.split([len(conversation) for conversation, _, _ in drafts])
        single_embeddings = of_sentences.split(
            [sum(map(len, conversation)) for conversation in sentences]
        )
        asked = [
            own
            or [
                self._retrieval(conversation, vectors, rng)
                for _ in range(QUESTIONS_PER_CONVERSATION)
            ]
            for (conversation, own, _), vectors in zip(drafts, embeddings, strict=True)
        ]
        rules = self._teacher.embed([questions[0].rule_text for questions in asked])
        return [
            Lesson(conversation, vectors, split, split_vectors, questions, rule, heard)
            for (conversation, _, heard), vectors, split, split_vectors, questions, rule in zip(
                drafts, embeddings, sentences, single_embeddings, asked, rules, strict=True
            )
        ]

    def _draft(self, words: int, rng: random.Random) -> Draft:
        if rng.random() < SITUATION_SHARE:
            generated = situation(max(2, round(words / 11 * rng.uniform(0.5, 1.0))), rng)
            conversation, heard = messages(generated)
            return (
                conversation,
                [question(generated, rng) for _ in range(QUESTIONS_PER_CONVERSATION)],
                heard,
            )
        conversation = []
        while not conversation:
            source = rng.choices(self._sources, weights=self._weights)[0]
            conversation = window(rng.choice(source), round(words * rng.uniform(0.4, 1.0)), rng)
        for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):  # words that the dialogues hardly use
            template = rng.choice(SALAD)
            text = template.format(*rng.choices(self._words, k=template.count("{}")))
            conversation.insert(
                rng.randrange(len(conversation) + 1),
                Message(rng.choice(("user", "assistant")), text),
            )
        return conversation, [], []

    def _retrieval(
        self, conversation: list[Message], vectors: torch.Tensor, rng: random.Random
    ) -> Question:
        similarity = self._pool_embeddings @ vectors.T  # [pool, turns]
        spoken = {
            role: [index for index, message in enumerate(conversation) if message.role == role]
            for role in ("user", "assistant")
        }
        who = rng.choice([role for role in spoken if spoken[role]] + [None])
        mine = spoken[who] if who else list(range(len(conversation)))
        best = similarity[:, mine].max(1).values
        other = similarity.max(1).values
        wanted = rng.random() < 0.5
        if wanted:
            anchor = similarity[:, rng.choice(mine)]
            choices = ((anchor >= SIMILAR) & (anchor < 0.98)).nonzero().flatten()
            if len(choices) == 0:
                choices = (best >= SIMILAR).nonzero().flatten()
        else:
            kind = rng.random()
            if who and kind < 0.35:  # the other speaker said it
                choices = ((best < DISSIMILAR) & (other >= SIMILAR)).nonzero().flatten()
            elif kind < 0.75:  # close, but not said
                choices = ((best < DISSIMILAR) & (best > 0.25)).nonzero().flatten()
            else:
                choices = (best < DISSIMILAR).nonzero().flatten()
        if len(choices) == 0:
            wanted, choices = False, best.argmin(keepdim=True)
        said = self._pool[int(choices[rng.randrange(len(choices))])]
        act = rng.choice(SAYS).format(said=said)
        return Question(
            f"{rng.choice(WHO[who])} {rng.choice(NOBODY_FORBIDS if who is None else FORBIDS).format(act=act)}",
            int(wanted),
        )


def sentences_of(text: str) -> list[str]:
    """The sentences of a turn, those of one or two words joined to the next, if any; nothing if it is one sentence.

    Joined with single spaces they are the text again, so that their ends can be found among its tokens.
    """
    sentences: list[str] = []
    for part in re.split(r"(?<=[.!?]) ", text):
        if sentences and len(sentences[-1].split()) < 3:
            sentences[-1] += " " + part
        else:
            sentences.append(part)
    return sentences if len(sentences) > 1 else []
