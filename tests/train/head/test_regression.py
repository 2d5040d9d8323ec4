"""A fitted head reads plain states and words: scaling and the prior are folded into its weights.

`test_fit.py` compares it with sklearn on a base's states.
"""

from __future__ import annotations

import numpy as np
import pytest

from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import NgramVocabulary, ngram_rows
from guard.weights.head import Head
from train.examples import Row
from train.head.regression import Regression
from train.head.rows import ReadRows, RowSpans, head_logits

WIDTH = 4


@pytest.fixture
def train() -> ReadRows:
    """Rows of one span, whose first state and one of whose words say the label, not always."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    spans: list[RowSpans] = []
    for index in range(60):
        label = index % 2
        states = rng.standard_normal((1, WIDTH)) * 5 + 3
        states[0, 0] += 4 * label
        words = [*rng.integers(10, 20, size=5).tolist(), label if rng.random() < 0.8 else 9]
        rows.append(Row(str(index), "train", label, Prompt(tuple(words), len(words))))
        spans.append(RowSpans(states.astype(np.float32), ngram_rows([words])))
    return ReadRows(rows, spans)


@pytest.fixture
def vocabulary(train: ReadRows) -> NgramVocabulary:
    return train.vocabulary()


def test_a_good_prior_decides_at_high_penalty(train: ReadRows, vocabulary: NgramVocabulary) -> None:
    """The prior is one number, so its weight costs the least penalty."""
    prior = Regression(train, vocabulary).fitted(1.0, 100.0)
    alone = Regression(train, vocabulary).fitted(1.0, 0.1)
    with_prior = Regression(train, vocabulary, prior).fitted(1.0, 0.1)
    assert isinstance(with_prior, Head)
    assert train.loss(with_prior) < train.loss(alone)
    logits, prior_logits = head_logits(with_prior, train.spans), head_logits(prior, train.spans)
    assert np.corrcoef(logits, prior_logits)[0, 1] > 0.9
