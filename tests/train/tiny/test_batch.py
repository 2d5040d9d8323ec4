"""Lessons as tensors: targets sit at turn ends, labels say what is known there."""

import dataclasses
import random

import pytest
import torch

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from tests.train.tiny.conftest import LABELS, TALK, lesson
from train.tiny.batch import IGNORED, LessonBatch, collate
from train.tiny.lessons.lesson import sentences_of
from train.tiny.lessons.situations import ActLabel
from train.tiny.vocabulary import Vocabulary


@pytest.fixture
def batch(builder: PromptBuilder) -> LessonBatch:
    return collate([lesson(3)], builder, LABELS, random.Random(0))


def test_meaning_is_asked_for_at_the_line_break_that_ends_each_turn(
    vocabulary: Vocabulary, batch: LessonBatch
) -> None:
    decode = vocabulary.tokenizer.decode
    ends = batch.meaning_at.tolist()
    before = [decode(batch.ids[row, column - 1]) for row, column in ends]
    assert [text.removeprefix("##")[-1] for text in before] == ["t", "?", "s", ">"]
    assert {decode(batch.ids[row, column]) for row, column in ends} == {"\n"}
    assert len(batch.meanings) == 4


def test_meaning_is_asked_for_at_the_last_token_of_each_sentence_of_a_longer_turn(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    text = "i would like to go. to the sea, back before the evening! where is the ticket?"
    split = sentences_of(text)
    assert split == [
        "i would like to go.",
        "to the sea, back before the evening!",
        "where is the ticket?",
    ]
    long = dataclasses.replace(
        lesson(1),
        messages=[Message("user", text), TALK[1]],
        turn_embeddings=torch.randn(2, 384),
        sentences=[split, []],
        sentence_embeddings=torch.randn(3, 384),
    )
    batch = collate([long], builder, LABELS, random.Random(0))
    columns = batch.meaning_at[:, 1].tolist()
    target = dict(zip(columns, batch.meanings, strict=True))
    decoded = {column: vocabulary.tokenizer.decode(batch.ids[0, column]) for column in columns}
    ends = [column for column in sorted(columns) if decoded[column] != "\n"]
    assert [decoded[column] for column in ends] == [".", "!", "?"]
    meanings = torch.stack([target[column] for column in ends])
    torch.testing.assert_close(meanings, long.sentence_embeddings)


def test_ends_are_labelled_with_the_speaker_and_in_a_generated_situation_with_the_act(
    builder: PromptBuilder,
) -> None:
    plain = lesson(2)
    text = "i promise to walk the puppy. he wrote 'i won't sign the lease'"
    act_labels = [
        [
            ActLabel("i promise to walk the puppy.", "promise", "pets", quoted=False),
            ActLabel(text, "refuse", "legal matters", quoted=True),
        ],
        [ActLabel(TALK[1].content, "joke", None, quoted=False)],
    ]
    situation = dataclasses.replace(
        plain,
        messages=[Message("user", text), TALK[1]],
        sentences=[sentences_of(text), []],
        sentence_embeddings=torch.randn(2, 384),
        act_labels=act_labels,
    )
    batch = collate([situation, plain], builder, LABELS, random.Random(0))
    promise, refuse = (
        {"act": label.act, "topic": label.topic, "quoted": label.quoted, "role": "user"}
        for label in act_labels[0]
    )
    joke = {"act": "joke", "quoted": False, "role": "assistant"}
    roles = [{"role": "user"}, {"role": "assistant"}]
    assert named(batch) == [promise, refuse, refuse, joke, {}, *roles, {}]


def named(batch: LessonBatch) -> list[dict[str, object]]:
    """The labels that are known, by name."""
    rows = []
    for indices in batch.labels.tolist():
        row = {}
        for name, index in zip(LABELS, indices, strict=True):
            if index != IGNORED:
                row[name] = LABELS[name][index]
        rows.append(row)
    return rows


def test_a_turn_of_several_lines_ends_at_its_last(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    lines = [Message("user", "first line\nsecond line"), TALK[1]]
    of_lines = dataclasses.replace(lesson(2), messages=lines)
    batch = collate([of_lines], builder, LABELS, random.Random(0))
    before = [
        vocabulary.tokenizer.decode(batch.ids[row, :column])
        for row, column in batch.meaning_at.tolist()
    ]
    assert before[0].endswith("second line")
    assert before[1].endswith("today?")


def test_next_token_targets_are_the_prefix_shifted_by_one(batch: LessonBatch) -> None:
    chosen = (batch.targets != IGNORED).nonzero()
    assert len(chosen) > 0
    for row, column in chosen.tolist():
        assert batch.targets[row, column] == batch.ids[row, column + 1]


def test_a_local_turn_sees_itself_and_the_scaffold_alone(builder: PromptBuilder) -> None:
    plain = collate([lesson(2)], builder, LABELS, random.Random(0)).mask[0, 0]
    batch = collate([lesson(2)], builder, LABELS, random.Random(0), local=True)
    local = batch.mask[0, 0]
    assert not (local & ~plain).any()
    first, second = batch.meaning_at[:2, 1].tolist()
    assert plain[second, first]
    assert not local[second, first]
    assert local[second, 0]


def test_all_of_a_batch_moves_to_the_device(batch: LessonBatch) -> None:
    moved = batch.to(torch.device("meta"))
    assert {tensor.device.type for tensor in vars(moved).values()} == {"meta"}
    assert moved.mask.shape == batch.mask.shape
