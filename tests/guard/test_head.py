"""A head's logit is the sum of what its states and its words say; its file gives it back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from guard.errors import GuardError
from guard.head import Head, HeadStates
from guard.prompt.ngrams import Vocabulary, ngrams_of
from tests.plain_words import plain_word_logit

TURNS = [[1, 2, 3], [2, 3, 3, 5]]
RNG = np.random.default_rng(0)


def random_head() -> Head:
    keys = ngrams_of(TURNS).keys[::2]
    return Head(
        weight=RNG.standard_normal(8).astype(np.float32),
        last_weight=RNG.standard_normal(8).astype(np.float32),
        bias=0.5,
        vocabulary=Vocabulary(keys, RNG.uniform(1, 3, len(keys)).astype(np.float32)),
        ngram_weights=RNG.standard_normal(len(keys)).astype(np.float32),
    )


def numbers(rows: int) -> np.ndarray:
    return RNG.standard_normal((rows, 8))


def test_a_logit_is_the_highest_span_s_the_last_turn_s_and_the_words_together() -> None:
    for _ in range(20):
        head, spans, last = random_head(), numbers(5), numbers(1)[0]
        of_words = plain_word_logit(head.tensors(), TURNS)
        highest = max(float(span @ head.weight) for span in spans)
        expected = highest + float(last @ head.last_weight) + of_words + 0.5
        states = HeadStates(spans, last)
        assert head.logit(states, ngrams_of(TURNS)) == pytest.approx(expected, abs=1e-5)


def test_what_is_written_is_read_again() -> None:
    head = random_head()
    again = Head.of_tensors(head.tensors(), "a file", "")
    states, words = HeadStates(numbers(3), numbers(1)[0]), ngrams_of(TURNS)
    assert again.logit(states, words) == head.logit(states, words)


def test_a_head_on_spans_reads_nothing_else() -> None:
    head = Head.on_spans(np.ones(8, np.float32), 1.0)
    assert not head.knows_words and random_head().knows_words
    assert head.logit(HeadStates(np.ones((1, 8)), numbers(1)[0]), ngrams_of(TURNS)) == 9.0
    assert Head.of_tensors(head.tensors(), "a file", "").bias == 1.0


def test_other_tensors_are_refused() -> None:
    head = random_head()
    short = replace(head, ngram_weights=head.ngram_weights[1:])
    narrow = replace(head, last_weight=head.last_weight[1:])
    for other in (short, narrow):
        with pytest.raises(GuardError, match=r"a file: a head has weight .*Train it again"):
            Head.of_tensors(other.tensors(), "a file", "Train it again")
    old = {key: head.tensors()[key] for key in ("weight", "bias")}
    with pytest.raises(GuardError, match="a head has weight"):
        Head.of_tensors(old, "a file", "Train it again")
