"""Lessons: the same draw gives the same lessons, every question has an answer from the teacher."""

import random
from itertools import chain

import pytest
import torch

from tests.train.tiny.conftest import TALK, toy_lessons
from train.tiny.lessons.lesson import (
    QUESTIONS_PER_CONVERSATION,
    RULE_TALK_SHARE,
    Lessons,
    sentences_of,
)
from train.tiny.lessons.rule_talk import LessonDraft


@pytest.fixture(scope="module")
def lessons() -> Lessons:
    return toy_lessons()


@pytest.mark.parametrize(
    "text", ["just one sentence here.", "no full stop", "", "hm. well. yes.", "v1.2 is out"]
)
def test_a_turn_of_one_sentence_has_no_sentence_targets(text: str) -> None:
    assert sentences_of(text) == []


def test_sentences_joined_are_the_text_again() -> None:
    text = "i see. where is it? to the left! ok. then we go there now."
    assert len(sentences_of(text)) > 1
    assert " ".join(sentences_of(text)) == text


def test_a_step_has_as_many_lessons_as_its_shape_and_repeats_itself(lessons: Lessons) -> None:
    first, again = (lessons.step(random.Random(3)) for _ in range(2))
    assert len(first) == 3
    for lesson, repeated in zip(first, again, strict=True):
        assert lesson.messages == repeated.messages
        assert lesson.questions == repeated.questions
        assert torch.equal(lesson.turn_embeddings, repeated.turn_embeddings)


def test_three_quarters_of_the_conversations_are_from_the_phrase_books(
    lessons: Lessons, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talk:
        def pair(self, words: int, rng: random.Random) -> list[LessonDraft]:
            return [LessonDraft([], [], [])] * 2

    monkeypatch.setattr(lessons, "_rule_talk", Talk())
    rng = random.Random(6)
    drafts = list(chain.from_iterable(lessons._drafts(rng) for _ in range(300)))
    from_books = sum(not draft.messages for draft in drafts)
    assert f"{RULE_TALK_SHARE:.0%}" == "75%"  # as the model card says
    assert from_books / len(drafts) == pytest.approx(RULE_TALK_SHARE, abs=0.05)


def test_embeddings_belong_to_their_texts(lessons: Lessons) -> None:
    for lesson in lessons.step(random.Random(4)):
        texts = [message.content for message in lesson.messages]
        sentences = list(chain.from_iterable(lesson.sentences))
        expected = lessons._teacher.embed(texts + sentences)
        vectors = torch.cat([lesson.turn_embeddings, lesson.sentence_embeddings])
        torch.testing.assert_close(vectors, expected, rtol=1e-3, atol=1e-4)
        assert lesson.sentences == [sentences_of(text) for text in texts]


def test_retrieval_questions_quote_the_pool_and_are_answered_by_who_said_it(
    lessons: Lessons,
) -> None:
    vectors = lessons._teacher.embed([message.content for message in TALK])
    rng = random.Random(5)
    labels = []
    for _ in range(20):
        questions = lessons._retrieval_questions(TALK, vectors, rng)
        assert len(questions) == QUESTIONS_PER_CONVERSATION
        for question in questions:
            assert any(turn in question.rule_text for turn in lessons._pool)
            labels.append(question.label)
    assert set(labels) <= {0, 1}
    assert 0 in labels
