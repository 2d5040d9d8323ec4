"""N-grams of token ids are counted as by loops, and weighed as by scikit-learn."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from guard.prompt.ngrams import NgramVocabulary, ngram_rows

TOKEN_IDS = st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1))


def ngrams(text: list[int]) -> list[tuple[int, ...]]:
    return [*((token,) for token in text), *itertools.pairwise(text)]


def read(key: int) -> tuple[int, ...]:
    """The tokens of a key."""
    if key < 2**32:
        return (key,)
    return key % 2**32, key // 2**32 - 1


@given(st.lists(st.lists(TOKEN_IDS, max_size=6), max_size=4))
def test_frequencies_are_those_of_a_loop(texts: list[list[int]]) -> None:
    counted = ngram_rows(texts)
    assert counted.keys.dtype == np.uint64 and counted.texts == len(texts)
    got: dict[tuple[int, tuple[int, ...]], float] = {}
    entries = zip(counted.rows, counted.keys, counted.frequencies, strict=True)
    for row, key, frequency in entries:
        got[int(row), read(int(key))] = float(frequency)
    expected: dict[tuple[int, tuple[int, ...]], float] = {}
    for row, text in enumerate(texts):
        for ngram, count in Counter(ngrams(text)).items():
            expected[row, ngram] = 1 + math.log(count)
    assert got == pytest.approx(expected)


def test_tfidf_is_that_of_scikit_learn() -> None:
    rng = random.Random(0)
    texts = [[1, *rng.choices(range(2, 12), k=rng.randint(1, 30))] for _ in range(40)]
    plain = TfidfVectorizer(analyzer=ngrams, min_df=2, max_df=29, sublinear_tf=True)
    plain.fit(texts[:30])
    vocabulary = NgramVocabulary.of([ngram_rows([text]) for text in texts[:30]])
    assert 1 not in vocabulary.keys  # which all of them have
    assert [read(int(key)) for key in vocabulary.keys] == sorted(
        plain.vocabulary_, key=lambda ngram: (ngram[1] + 1 if len(ngram) > 1 else 0, ngram[0])
    )
    rows, columns, values = vocabulary.tfidf(ngram_rows(texts))
    got = np.zeros((len(texts), len(vocabulary.keys)))
    got[rows, columns] = values
    order = [plain.vocabulary_[read(int(key))] for key in vocabulary.keys]
    np.testing.assert_allclose(got, plain.transform(texts).toarray()[:, order], rtol=1e-6)


def test_a_vocabulary_has_the_ngrams_of_most_documents_and_unknown_ones_count_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary = NgramVocabulary.of(
        [ngram_rows([[7], [7], [8]]), ngram_rows([[8]]), ngram_rows([])]
    )
    assert vocabulary.keys.tolist() == [8]
    monkeypatch.setattr("guard.prompt.ngrams.MOST_NGRAMS", 2)
    texts = [[[9], [5]], [[9], [5], [6]], [[9], [6], [4]], [[4]]]
    vocabulary = NgramVocabulary.of([ngram_rows(document) for document in texts])
    assert vocabulary.keys.tolist() == [4, 9]
    vocabulary = NgramVocabulary.of([ngram_rows([text]) for text in ([1, 2], [1, 2], [3])])
    rows, columns, values = vocabulary.tfidf(ngram_rows([[], [9, 8, 2**31 - 1], [9, 1]]))
    assert (rows.tolist(), vocabulary.keys[columns].tolist(), values.tolist()) == ([2], [1], [1.0])
    nothing = NgramVocabulary.of([ngram_rows([[1]]), ngram_rows([[2]])])
    assert not len(nothing.keys) and not len(nothing.tfidf(ngram_rows([[1]])).rows)
