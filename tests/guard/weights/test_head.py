"""A head's logit is that of its highest span; its file gives the head back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from guard.errors import GuardError
from guard.prompt.ngrams import NgramVocabulary, ngram_rows
from guard.verdict import Calibration
from guard.weights.head import Head, WordWeights, answer_hash, mean_head
from tests.plain_words import plain_word_logit

PARTS_OF_AN_ANSWER = {
    "verdict": (Calibration, "p_violation", lambda self, logit: 0.5),
    "band": (Calibration, "_is_uncertain", lambda self, p: False),
    "head": (Head, "logit", lambda self, states, words: 0.25),
    "words": (WordWeights, "logits", lambda self, texts: np.zeros(texts.texts)),
}


@pytest.mark.parametrize("part", PARTS_OF_AN_ANSWER)
def test_the_hash_of_answers_names_how_each_is_computed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answer_hash()
    assert answer_hash() == before
    monkeypatch.setattr(*PARTS_OF_AN_ANSWER[part])
    assert answer_hash() != before


TEXTS = [[1, 2, 3], [2, 3, 3, 5], []]
RNG = np.random.default_rng(0)


def random_head() -> Head:
    keys = np.unique(ngram_rows(TEXTS).keys)[::2]
    vocabulary = NgramVocabulary(keys, RNG.uniform(1, 3, len(keys)).astype(np.float32))
    words = WordWeights(vocabulary, RNG.standard_normal(len(keys)).astype(np.float32))
    return Head(RNG.standard_normal(8).astype(np.float32), 0.5, words)


def test_spans_and_means_of_heads_are_of_their_states_and_words() -> None:
    for _ in range(20):
        head, states = random_head(), RNG.standard_normal((len(TEXTS), 8))
        logits = []
        for state, text in zip(states, TEXTS, strict=True):
            logits.append(float(state @ head.weight) + plain_word_logit(head.tensors(), text) + 0.5)
        assert head.logit(states, ngram_rows(TEXTS)) == pytest.approx(max(logits), abs=1e-5)
    # Neither another turn nor a later part of a long one makes a violation less of one.
    head, states = random_head(), RNG.standard_normal((len(TEXTS), 8))
    for spans in (1, 2, 3):
        before = head.logit(states[:1], ngram_rows(TEXTS[:1]))
        assert head.logit(states[:spans], ngram_rows(TEXTS[:spans])) >= before - 1e-9
    first, other = random_head(), random_head()
    weights = RNG.standard_normal(len(first.words.weights)).astype(np.float32)
    second = replace(other, bias=-3.0, words=replace(first.words, weights=weights))
    mean = mean_head([first, second], np.array([0.25, 0.75]))
    for text in TEXTS:
        state, words = RNG.standard_normal((1, 8)), ngram_rows([text])
        of_both = 0.25 * first.logit(state, words) + 0.75 * second.logit(state, words)
        assert mean.logit(state, words) == pytest.approx(of_both, abs=1e-5)


def test_a_head_with_or_without_words_is_read_as_it_was_written() -> None:
    head = random_head()
    again = Head.of_tensors(head.tensors(), "a file", "")
    states, words = RNG.standard_normal((3, 8)), ngram_rows(TEXTS)
    assert again.logit(states, words) == head.logit(states, words)
    head = Head(np.ones(8, np.float32), 1.0)
    assert not head.words and random_head().words
    assert head.logit(np.ones((1, 8)), ngram_rows([TEXTS[0]])) == 9.0
    assert Head.of_tensors(head.tensors(), "a file", "").bias == 1.0


def test_other_tensors_are_refused() -> None:
    head = random_head()
    short = replace(head, words=replace(head.words, weights=head.words.weights[1:]))
    with pytest.raises(GuardError, match=r"a file: tensors of another .*Train it again"):
        Head.of_tensors(short.tensors(), "a file", "Train it again")
    with pytest.raises(GuardError, match="tensors of another name"):
        WordWeights.of_tensors(head.tensors(), "a file", "Train it again")
    with pytest.raises(GuardError, match="a weight for each number of a state"):
        empty = replace(head, weight=head.weight[:0])
        Head.of_tensors(empty.tensors(), "a file", "Train it again")
    old = {key: head.tensors()[key] for key in ("weight", "bias")}
    with pytest.raises(GuardError, match="tensors of another name"):
        Head.of_tensors(old, "a file", "Train it again")
