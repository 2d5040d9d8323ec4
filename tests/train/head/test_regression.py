"""A fitted head reads plain states and words: scaling and the prior are folded into its weights.

`test_fit.py` compares it with sklearn on a base's states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import ngram_rows
from guard.weights.head import Head
from train.examples import Row, has_of_each_label
from train.head.regression import ReadRows, Regression, RowSpans, head_logits, read_rows
from train.job import Job

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


def test_a_good_prior_decides_at_high_penalty(train: ReadRows) -> None:
    """The prior is one number, so its weight costs the least penalty."""
    vocabulary = train.vocabulary()
    prior = Regression(train, vocabulary).fitted(1.0, 100.0)
    alone = Regression(train, vocabulary).fitted(1.0, 0.1)
    with_prior = Regression(train, vocabulary, prior).fitted(1.0, 0.1)
    assert isinstance(with_prior, Head)
    assert train.loss(with_prior) < train.loss(alone)
    logits, prior_logits = head_logits(with_prior, train.spans), head_logits(prior, train.spans)
    assert np.corrcoef(logits, prior_logits)[0, 1] > 0.9


LABELS = (0, 1, 0, 1, 0)


def row(index: int) -> Row:
    """The first two are generated."""
    prompt = Prompt((index,), 1)
    return Row(str(index), "train", LABELS[index], prompt, is_generated=index < 2)


def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
    """Two spans of one number each: the row's, and its negative."""
    spans: list[RowSpans] = []
    for prompt in prompts:
        number = float(prompt.token_ids[0])
        spans.append(RowSpans(np.array([[number], [-number]], np.float32), ngram_rows([[], []])))
    return spans


@pytest.fixture
def rows(job: Job) -> ReadRows:
    return read_rows(job, reader, [row(index) for index in range(len(LABELS))])


def ids(rows: ReadRows) -> list[str]:
    return [row.id for row in rows.rows]


def test_own_and_generated_rows_are_all_rows(rows: ReadRows) -> None:
    """The rarer label decides how many there are of each, and the highest span a row's logit."""
    assert (ids(rows.generated()), ids(rows.own())) == (["0", "1"], ["2", "3", "4"])
    joined = rows.own().joined_with(rows.generated())
    assert ids(joined) == ["2", "3", "4", "0", "1"] and joined.labels == [0, 1, 0, 0, 1]
    assert joined.spans[0].states.tolist() == [[2.0], [-2.0]]
    assert has_of_each_label(rows.rows, 2) and not has_of_each_label(rows.rows, 3)
    logits = head_logits(Head(np.array([-1.0], np.float32), 0.5), rows.spans)
    assert logits == [0.5 + index for index in range(len(LABELS))]
