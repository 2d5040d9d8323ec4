"""N-grams of token ids are counted as by loops, and weighed as by scikit-learn."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from guard.prompt.ngrams import LAST_TURN, Ngrams, Vocabulary, ngrams_of

TOKEN_IDS = st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1))


@given(st.lists(st.lists(TOKEN_IDS, max_size=6), max_size=4))
def test_counts_are_those_of_a_loop(turns: list[list[int]]) -> None:
    expected: Counter[tuple[bool, int, int | None]] = Counter()
    for number, turn in enumerate(turns):
        ngrams: list[tuple[int, int | None]] = [(token, None) for token in turn]
        ngrams += itertools.pairwise(turn)
        expected.update((False, *ngram) for ngram in ngrams)
        if number == len(turns) - 1:
            expected.update((True, *ngram) for ngram in ngrams)
    counted = ngrams_of(turns)
    assert counted.keys.dtype == np.uint64
    assert (np.diff(counted.keys.astype(object)) > 0).all()
    counts = np.exp(counted.frequencies - 1).round().astype(int)
    pairs = zip(counted.keys.tolist(), counts.tolist(), strict=True)
    assert {read(key): count for key, count in pairs} == dict(expected)


def read(key: int) -> tuple[bool, int, int | None]:
    """What a key says: whether of the last turn, and the tokens."""
    second = (key >> 31) % 2**32 - 1
    return key >= LAST_TURN, key % 2**31, None if second < 0 else second


def rows_of(texts: list[list[int]]) -> list[Ngrams]:
    """Without those of the last turn, which scikit-learn does not know."""
    rows: list[Ngrams] = []
    for text in texts:
        keys, frequencies = ngrams_of([text])
        rows.append(Ngrams(keys[keys < LAST_TURN], frequencies[keys < LAST_TURN]))
    return rows


def test_tfidf_is_that_of_scikit_learn() -> None:
    rng = random.Random(0)
    texts = [[1, *rng.choices(range(2, 12), k=rng.randint(1, 30))] for _ in range(40)]

    def ngrams(text: list[int]) -> list[tuple[int, ...]]:
        return [*((token,) for token in text), *itertools.pairwise(text)]

    plain = TfidfVectorizer(analyzer=ngrams, min_df=2, max_df=29, sublinear_tf=True)
    plain.fit(texts[:30])
    rows = rows_of(texts)
    vocabulary = Vocabulary.of(rows[:30])
    assert 1 not in vocabulary.keys  # which all of them have
    assert len(vocabulary.keys) == len(plain.vocabulary_) > 50
    for text, row in zip(texts, rows, strict=True):
        indices, values = vocabulary.tfidf(row)
        np.testing.assert_allclose(
            np.sort(values), np.sort(plain.transform([text]).data), rtol=1e-6
        )
        assert len(set(indices.tolist())) == len(indices)


def test_unknown_ngrams_count_nothing() -> None:
    vocabulary = Vocabulary.of(rows_of([[1, 2], [1, 2], [3]]))
    for unknown in ([], [9, 8, 2**31 - 1]):
        indices, values = vocabulary.tfidf(ngrams_of([unknown]))
        assert not len(indices) and not len(values)
    nothing = Vocabulary.of(rows_of([[1], [2]]))
    assert not len(nothing.keys) and not len(nothing.tfidf(ngrams_of([[1]]))[0])
