"""A small vocabulary, a conversation and lessons on it."""

from __future__ import annotations

import functools

import pytest
import torch

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from train.tiny.batch import labels_of
from train.tiny.lessons.corpus import CorpusSource
from train.tiny.lessons.lesson import Lesson, Lessons
from train.tiny.lessons.situations import ACTS, RuleQuestion
from train.tiny.student import STUDENT_SHAPE
from train.tiny.teacher import FOLDER, Teacher
from train.tiny.vocabulary import Vocabulary, cut_vocabulary

TALK = (
    Message("user", "good morning, i would like to buy a ticket"),
    Message("assistant", "sure, where do you want to go today?"),
    Message("user", "to the sea, and back before the evening comes"),
)
SHAPES = ((30, 3, 1.0),)  # of lessons: few words, few conversations
LABELS = labels_of(tuple(ACTS))


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return cut_vocabulary(FOLDER, [message.content for message in TALK], 1500)


@pytest.fixture(scope="session")
def builder(vocabulary: Vocabulary) -> PromptBuilder:
    return PromptBuilder(vocabulary.tokenizer.backend_tokenizer)


def lesson(turns: int) -> Lesson:
    """The first turns of TALK with random embeddings and two questions."""
    questions = [
        RuleQuestion("The user must not buy anything.", 1),
        RuleQuestion("The bot must never lie about the weather or the sea.", 0),
    ]
    return Lesson(
        list(TALK[:turns]),
        torch.randn(turns, 384),
        [[]] * turns,
        torch.empty(0, 384),
        questions,
        torch.randn(384),
    )


@functools.cache
def teacher() -> Teacher:
    """The teacher, loaded once."""
    return Teacher()


@pytest.fixture
def small_student(monkeypatch: pytest.MonkeyPatch) -> None:
    """New students have a quarter of the weights, for tests that train one."""
    monkeypatch.setitem(STUDENT_SHAPE, "intermediate_size", 64)


def toy_lessons(digest: str = "0") -> Lessons:
    source = CorpusSource("toy", [TALK] * 5, ("none",), digest)
    return Lessons([source], ["sea", "ticket"], teacher(), shapes=SHAPES)
