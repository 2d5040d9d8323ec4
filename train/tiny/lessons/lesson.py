"""What the student sees in one step: conversations, their turns' meanings, and rule questions with
answers.

Real dialogues carry retrieval questions ("must not say anything like …", answered by the teacher's
similarity), generated situations and conversations from the served rules' phrase books carry
questions about acts. Knows nothing of the student's weights.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from guard.conversation.example import Message
from train.tiny.lessons.corpus import CorpusSource, window
from train.tiny.lessons.rule_talk import LessonDraft, RuleTalk
from train.tiny.lessons.situations import (
    ACTS,
    SALAD,
    WHO,
    ActLabel,
    RuleQuestion,
    forbids_of,
    messages,
    question,
    situation,
)
from train.tiny.teacher import Teacher

QUESTIONS_PER_CONVERSATION = 6
RULE_TALK_DRAWS = 0.6  # where phrase books are given; such a draw brings two conversations
RULE_TALK_SHARE = 2 * RULE_TALK_DRAWS / (1 + RULE_TALK_DRAWS)  # of the conversations
SITUATION_SHARE = 0.4  # of the other draws
SIMILAR = 0.6  # the least cosine between turns that say something like each other
DISSIMILAR = 0.42  # below this cosine they do not
POOL = 12_000  # real turns that retrieval questions quote
POOL_WORDS = range(4, 41)  # of such a turn
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

    `turn_embeddings` `[turns, 384]`; `sentences`: each turn in sentences, empty for a turn of one;
    `sentence_embeddings`: of all of them, one after another, `[n, 384]`; questions, and the
    embedding of the first one's rule text `[384]`; of a generated conversation, the acts of each
    message.
    """

    messages: list[Message]
    turn_embeddings: Tensor
    sentences: list[list[str]]
    sentence_embeddings: Tensor
    questions: list[RuleQuestion]
    rule_embedding: Tensor
    act_labels: list[list[ActLabel]] = field(default_factory=list)


class Lessons:
    """Samples lessons. Retrieval questions quote a fixed set of the sources' real turns."""

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        words: Sequence[str],
        teacher: Teacher,
        *,
        rule_talk: RuleTalk | None = None,
        shapes: Sequence[tuple[int, int, float]] = SHAPES,
    ) -> None:
        self._teacher = teacher
        self._words = words
        self._shapes = shapes
        self._rule_talk = rule_talk
        self.acts: tuple[str, ...] = tuple(ACTS)
        if rule_talk:
            self.acts += rule_talk.acts
        self.digests = [source.digest for source in sources]
        self._sources = [source.conversations for source in sources]
        # By the square root of the size, so that the largest corpus does not drown the others.
        self._weights = [source.turns**0.5 for source in sources]
        turns = _quotable_turns(sources)
        self._pool = random.Random(0).sample(turns, min(POOL, len(turns)))
        self._pool_embeddings = teacher.embed(self._pool, progress=True)

    def step(self, rng: random.Random) -> list[Lesson]:
        """The lessons of one optimizer step, all of similar length."""
        drafts = self._drafts(rng)
        turns, sentences = self._embeddings(drafts)
        questions = [
            draft.questions or self._retrieval_questions(draft.messages, vectors, rng)
            for draft, vectors in zip(drafts, turns, strict=True)
        ]
        rules = self._teacher.embed([asked[0].rule_text for asked in questions])
        return [
            Lesson(
                messages=draft.messages,
                turn_embeddings=turns[number],
                sentences=_sentences_of_turns(draft),
                sentence_embeddings=sentences[number],
                questions=questions[number],
                rule_embedding=rules[number],
                act_labels=draft.act_labels,
            )
            for number, draft in enumerate(drafts)
        ]

    def _drafts(self, rng: random.Random) -> list[LessonDraft]:
        weights = [shape[2] for shape in self._shapes]
        words, count, _ = rng.choices(self._shapes, weights=weights)[0]
        drafts: list[LessonDraft] = []
        while len(drafts) < count:
            if self._rule_talk and rng.random() < RULE_TALK_DRAWS:
                drafts += self._rule_talk.pair(words, rng)
            elif rng.random() < SITUATION_SHARE:
                drafts.append(_situation_draft(words, rng))
            else:
                drafts.append(LessonDraft(self._real_conversation(words, rng), [], []))
        return drafts

    def _embeddings(
        self, drafts: Sequence[LessonDraft]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The embeddings of each draft's turns, and of the sentences of its longer turns, computed
        in one go.
        """
        turns: list[str] = []
        sentences: list[str] = []
        turn_counts, sentence_counts = [], []
        for draft in drafts:
            texts = [message.content for message in draft.messages]
            parts = list(chain.from_iterable(_sentences_of_turns(draft)))
            turns += texts
            sentences += parts
            turn_counts.append(len(texts))
            sentence_counts.append(len(parts))
        embeddings = self._teacher.embed(turns + sentences)
        turn_embeddings, sentence_embeddings = embeddings.split([len(turns), len(sentences)])
        return turn_embeddings.split(turn_counts), sentence_embeddings.split(sentence_counts)

    def _real_conversation(self, words: int, rng: random.Random) -> list[Message]:
        """A window of a source's conversation, with up to three sentences of words that the
        dialogues hardly use.
        """
        conversation: list[Message] = []
        while not conversation:
            source = rng.choices(self._sources, weights=self._weights)[0]
            conversation = window(rng.choice(source), round(words * rng.uniform(0.4, 1.0)), rng)
        for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):
            template = rng.choice(SALAD)
            text = template.format(*rng.choices(self._words, k=template.count("{}")))
            position = rng.randrange(len(conversation) + 1)
            conversation.insert(position, Message(rng.choice(("user", "assistant")), text))
        return conversation

    def _retrieval_questions(
        self, conversation: Sequence[Message], vectors: Tensor, rng: random.Random
    ) -> list[RuleQuestion]:
        similarity = self._pool_embeddings @ vectors.T
        speakers = [message.role for message in conversation]
        return [
            self._retrieval(similarity, speakers, rng) for _ in range(QUESTIONS_PER_CONVERSATION)
        ]

    def _retrieval(
        self, similarity: Tensor, speakers: Sequence[str], rng: random.Random
    ) -> RuleQuestion:
        """A question about whether a speaker says something like a turn of the pool, by their
        `similarity` `[pool, turns]`.
        """
        who = rng.choice([*(role for role in ("user", "assistant") if role in speakers), None])
        turns = [index for index, role in enumerate(speakers) if who in (None, role)]
        speaker_similarity = similarity[:, turns].max(1).values
        is_said = rng.random() < 0.5
        if is_said:
            choices = _similar(similarity[:, rng.choice(turns)], speaker_similarity)
        else:
            choices = _dissimilar(speaker_similarity, similarity.max(1).values, who, rng)
        if len(choices) == 0:
            is_said = False
            choices = speaker_similarity.argmin(keepdim=True)
        statement = self._pool[int(choices[rng.randrange(len(choices))])]
        act = rng.choice(SAYS).format(said=statement)
        subject = rng.choice(WHO[who])
        forbids = rng.choice(forbids_of(who)).format(act=act)
        return RuleQuestion(f"{subject} {forbids}", int(is_said))


def _quotable_turns(sources: Sequence[CorpusSource]) -> list[str]:
    """The distinct turns that are not too short or too long to be quoted, sorted."""
    turns: set[str] = set()
    for source in sources:
        turns.update(source.texts)
    return sorted(turn for turn in turns if len(turn.split()) in POOL_WORDS)


def _situation_draft(words: int, rng: random.Random) -> LessonDraft:
    utterances = situation(max(2, round(words / 11 * rng.uniform(0.5, 1.0))), rng)
    conversation, act_labels = messages(utterances)
    questions = [question(utterances, rng) for _ in range(QUESTIONS_PER_CONVERSATION)]
    return LessonDraft(conversation, questions, act_labels)


def _sentences_of_turns(draft: LessonDraft) -> list[list[str]]:
    return [sentences_of(message.content) for message in draft.messages]


def _similar(anchor: Tensor, speaker_similarity: Tensor) -> Tensor:
    """Indices of the pool's turns that mean about the same as one turn; if there are none, the same
    as any turn of the speaker.
    """
    choices = ((anchor >= SIMILAR) & (anchor < 0.98)).nonzero().flatten()
    if len(choices) == 0:
        choices = (speaker_similarity >= SIMILAR).nonzero().flatten()
    return choices


def _dissimilar(
    speaker_similarity: Tensor, anybody_similarity: Tensor, who: str | None, rng: random.Random
) -> Tensor:
    """Indices of the pool's turns that the speaker did not say: the other one did, or they are
    close, or any.
    """
    is_absent = speaker_similarity < DISSIMILAR
    kind = rng.random()
    if who and kind < 0.35:
        is_absent &= anybody_similarity >= SIMILAR
    elif kind < 0.75:
        is_absent &= speaker_similarity > 0.25
    return is_absent.nonzero().flatten()


def sentences_of(text: str) -> list[str]:
    """The sentences of a turn, those of one or two words joined to the next, if any; nothing if it
    is one sentence.

    Joined with single spaces they are the text again, so that their ends can be found among its
    tokens.
    """
    sentences: list[str] = []
    for part in re.split(r"(?<=[.!?]) ", text):
        if sentences and len(sentences[-1].split()) < 3:
            sentences[-1] += " " + part
        else:
            sentences.append(part)
    if len(sentences) == 1:
        return []
    return sentences
