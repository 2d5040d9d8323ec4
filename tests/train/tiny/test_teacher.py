"""The teacher's embeddings: unit length, in order, whatever shares a batch."""

import pytest
import torch

from train.tiny.teacher import Teacher

TEXTS = ["the cat sat on the mat, and there it stayed all day", "a dog", "the cat lay on a rug"]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher()


def test_embeddings_have_unit_length_and_tell_meanings_apart(teacher: Teacher) -> None:
    vectors = teacher.embed(TEXTS)
    assert vectors.shape == (3, 384)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1]


def test_what_shares_a_batch_and_how_long_it_is_changes_nothing(teacher: Teacher) -> None:
    together = teacher.embed(TEXTS)
    apart = teacher.embed(TEXTS, batch_tokens=1)
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
    assert teacher.embed([]).shape == (0, 384)


def test_a_text_is_read_to_its_128th_token(teacher: Teacher) -> None:
    long = "word " * 300
    torch.testing.assert_close(*teacher.embed([long, long + "and another thing"]))
