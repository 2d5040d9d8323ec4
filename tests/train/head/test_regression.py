"""A fitted head reads plain states and words: scaling and the prior are folded into its weights.

`test_fit.py` compares it with sklearn on a base's states.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix, hstack, random_array
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from train.head.regression import TEMPERATURE, Coefficients, SpanRows

WIDTH, COLUMNS = 8, 40


@pytest.fixture(params=range(3))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def random_rows(rng: np.random.Generator, rows: int, most_spans: int) -> SpanRows:
    """Rows of 1 to `most_spans` spans, and labels that these have something to do with."""
    counts = rng.integers(1, most_spans + 1, size=rows)
    starts = np.cumsum(counts) - counts
    dense = rng.standard_normal((counts.sum(), WIDTH))
    sparse = random_array((counts.sum(), COLUMNS), density=0.1, rng=rng, format="csr")
    told = dense[starts, 0] + sparse.sum(axis=1)[starts] - np.mean(sparse.sum(axis=1))
    labels = (told + rng.standard_normal(rows) > 0).astype(float)
    return SpanRows(dense, csr_matrix(sparse), starts, labels)


def plain_loss(rows: SpanRows, of: Coefficients, strength: float) -> float:
    """Row by row."""
    logits = rows.dense @ of.dense + rows.sparse @ of.sparse
    total = (of.dense @ of.dense + of.sparse @ of.sparse) / (2 * strength)
    for spans, label in zip(np.split(logits, rows.starts[1:]), rows.labels, strict=True):
        logit = TEMPERATURE * np.log(np.exp(spans / TEMPERATURE).sum()) + of.bias
        total += np.logaddexp(0, -logit if label else logit)
    return float(total)


def highest(rows: SpanRows, of: Coefficients) -> np.ndarray:
    logits = rows.dense @ of.dense + rows.sparse @ of.sparse
    return np.maximum.reduceat(logits, rows.starts) + of.bias


@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_of_one_span_a_row_it_is_sklearn_s(rng: np.random.Generator, strength: float) -> None:
    rows = random_rows(rng, 200, most_spans=1)
    inputs = hstack([csr_matrix(rows.dense), rows.sparse]).tocsr()
    plain = LogisticRegression(C=strength, max_iter=5000, tol=1e-8).fit(inputs, rows.labels)
    fitted = rows.fitted(strength)
    np.testing.assert_allclose(fitted.dense, plain.coef_[0, :WIDTH], atol=2e-3)
    np.testing.assert_allclose(fitted.sparse, plain.coef_[0, WIDTH:], atol=2e-3)
    assert fitted.bias == pytest.approx(plain.intercept_[0], abs=2e-3)


def test_of_several_spans_no_step_away_has_a_lower_loss(rng: np.random.Generator) -> None:
    rows = random_rows(rng, 100, most_spans=6)
    fitted = rows.fitted(1.0)
    lowest = plain_loss(rows, fitted, 1.0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            away = Coefficients(
                fitted.dense + size * rng.standard_normal(WIDTH),
                fitted.sparse + size * rng.standard_normal(COLUMNS),
                fitted.bias + size * float(rng.standard_normal()),
            )
            assert plain_loss(rows, away, 1.0) > lowest


@pytest.mark.parametrize("rows_count", [60, 300])
def test_the_one_deciding_span_is_found(rng: np.random.Generator, rows_count: int) -> None:
    def documents() -> SpanRows:
        """Of twenty spans of one; in every second row one says something else as well."""
        labels = np.arange(rows_count) % 2
        dense = rng.standard_normal((20 * rows_count, WIDTH))
        starts = 20 * np.arange(rows_count)
        planted = starts + rng.integers(0, 20, size=rows_count)
        dense[planted[labels == 1], 1] += 6
        sparse = random_array((len(dense), COLUMNS), density=0.1, rng=rng, format="csr")
        return SpanRows(dense, csr_matrix(sparse), starts, labels.astype(float))

    fitted = documents().fitted(1.0)
    unseen = documents()
    assert roc_auc_score(unseen.labels, highest(unseen, fitted)) > 0.95
