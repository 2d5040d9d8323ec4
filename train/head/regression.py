"""The rows that a head is fitted to, and its fits to their spans. Knows nothing of models or of how
settings are chosen.

States are standardised for the regression and divided by the root of their length. So they weigh as
much as the words, whose TF-IDF has length 1. The scaling is folded back into the written weights
(`guard/weights/head.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from guard.errors import GuardError
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import NgramRows, NgramVocabulary
from guard.weights.head import Head, WordWeights
from train.calibration.validation import validation_loss
from train.examples import Row
from train.job import Job

PRIOR_SCALE = 0.3  # what a prior's standardised logit is multiplied by beside the states


class Regression:
    """The regressions of a job on the spans of its training rows. A `prior` is a head with the same
    vocabulary, or without words; its logit of a span is one more number beside the span's states
    (hypothesis transfer learning: Kuzborskij and Orabona, 2013). The fitted head adds the prior's
    weights to its own, so it is one head again.
    """

    def __init__(
        self, train: ReadRows, vocabulary: NgramVocabulary, prior: Head | None = None
    ) -> None:
        states = np.concatenate([row.states for row in train.spans]).astype(np.float64)
        counts = np.array([len(row.states) for row in train.spans])
        self._starts = np.cumsum(counts) - counts
        self._labels = np.array(train.labels, np.float64)
        self._scaler = StandardScaler()
        self._dense = self._scaler.fit_transform(states) / np.sqrt(states.shape[1])
        self.vocabulary = vocabulary
        self._tfidf = self._span_tfidf([row.words for row in train.spans])
        if prior is not None and not prior.words:
            no_weights = np.zeros(len(vocabulary.keys), np.float32)
            prior = replace(prior, words=WordWeights(vocabulary, no_weights))
        self.prior = prior
        if prior is not None:
            self._append_prior(prior, train)

    def _append_prior(self, prior: Head, train: ReadRows) -> None:
        """Append the prior's standardised logit of each span as a column."""
        row_logits: list[np.ndarray] = []
        for row in train.spans:
            row_logits.append(prior.span_logits(row.states.astype(np.float64), row.words))
        logits = np.concatenate(row_logits)[:, None]
        self._prior_scaler = StandardScaler().fit(logits)
        column = PRIOR_SCALE * self._prior_scaler.transform(logits)
        self._dense = np.concatenate([self._dense, column], axis=1)

    def fits(self, settings: Sequence[tuple[float, float]]) -> list[Head]:
        """The head of each pair of word scale and C, and last the prior, if there is one."""
        heads = [self.fitted(word_scale, strength) for word_scale, strength in settings]
        return [*heads, self.prior] if self.prior is not None else heads

    def fitted(self, word_scale: float, strength: float) -> Head:
        """The head that is fitted with TF-IDF multiplied by `word_scale` and C = `strength`."""
        rows = SpanRows(self._dense, self._tfidf * word_scale, self._starts, self._labels)
        dense_weights, tfidf_weights, bias = rows.fitted(strength)
        width = len(self._scaler.scale_)
        weight = dense_weights[:width] / np.sqrt(width) / self._scaler.scale_
        bias -= float(weight @ self._scaler.mean_)
        word_weights = tfidf_weights * word_scale
        if self.prior is not None:
            share = float(PRIOR_SCALE * dense_weights[width] / self._prior_scaler.scale_[0])
            weight = weight + share * self.prior.weight
            word_weights = word_weights + share * self.prior.words.weights
            bias -= share * float(self._prior_scaler.mean_[0])
        return Head(
            weight=weight.astype(np.float32),
            bias=float(np.float32(bias)),
            words=WordWeights(self.vocabulary, word_weights.astype(np.float32)),
        )

    def _span_tfidf(self, words: Sequence[NgramRows]) -> csr_matrix:
        """The TF-IDF of all rows' spans, [spans, n-grams]."""
        shape = (len(self._dense), len(self.vocabulary.keys))
        rows, ngrams, values = [], [], []
        for start, row_words in zip(self._starts, words, strict=True):
            tfidf = self.vocabulary.tfidf(row_words)
            rows.append(start + tfidf.rows)
            ngrams.append(tfidf.ngrams)
            values.append(tfidf.values)
        places = np.concatenate(rows), np.concatenate(ngrams)
        return csr_matrix((np.concatenate(values), places), shape=shape)


class RowSpans(NamedTuple):
    """What a head reads of a prompt: the states of its spans, [spans, hidden size] float32, and the
    words of each.
    """

    states: np.ndarray
    words: NgramRows


# Prompts -> the spans of each.
SpansReader = Callable[[Sequence[Prompt]], list[RowSpans]]


@dataclass(frozen=True)
class ReadRows:
    """Rows, and what a head reads of each."""

    rows: Sequence[Row]
    spans: Sequence[RowSpans]

    @property
    def labels(self) -> list[int]:
        return [row.label for row in self.rows]

    def loss(self, head: Head) -> float:
        return validation_loss(head_logits(head, self.spans), self.labels)

    def at(self, indices: Iterable[int]) -> ReadRows:
        chosen = list(indices)
        return ReadRows([self.rows[i] for i in chosen], [self.spans[i] for i in chosen])

    def generated(self) -> ReadRows:
        return self.at(i for i, row in enumerate(self.rows) if row.is_generated)

    def own(self) -> ReadRows:
        return self.at(i for i, row in enumerate(self.rows) if not row.is_generated)

    def vocabulary(self) -> NgramVocabulary:
        return NgramVocabulary.of([spans.words for spans in self.spans])


def read_rows(job: Job, reader: SpansReader, rows: Sequence[Row]) -> ReadRows:
    """The rows with their spans. Raises GuardError for states that are not finite."""
    spans = reader([row.prompt for row in rows])
    if not all(np.isfinite(row.states).all() for row in spans):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("the base's states are not finite", where=job.name, remedy=remedy)
    return ReadRows(rows, spans)


def head_logits(head: Head, rows: Sequence[RowSpans]) -> list[float]:
    return [head.logit(row.states.astype(np.float64), row.words) for row in rows]


TEMPERATURE = 0.3  # T, in nats
MOST_STEPS = 1000  # L-BFGS
TOLERANCE = 1e-7  # for the gradient of the mean loss, in nats

Array = npt.NDArray[np.float64]


class Coefficients(NamedTuple):
    """The weight of each column of `dense` [width] and `sparse` [columns] in a span's logit, in
    nats.
    """

    dense: Array
    sparse: Array
    bias: float


@dataclass(frozen=True)
class SpanRows:
    """A logistic regression on rows of several spans, of which the highest logit counts. The spans
    of all rows stand one row's after another's: `dense` [spans, width], `sparse` [spans, columns].
    `starts` [rows] is the index of each row's first span; every row has one. `labels` [rows] are 0
    or 1.

    A maximum teaches a row's highest span alone, and a fit that picks spans and fits to them in
    turns need not settle (docs/lessons.md). So the maximum is smoothed while it is fitted:

        logit of a row = T log(sum over its spans of exp(logit of the span / T)) + bias

    It is above the maximum by at most T log(spans). For one span it is that span's logit, and the
    fit is the plain logistic regression. Multiple-instance learning with log-sum-exp: Ramon and De
    Raedt, 2000.
    """

    dense: Array
    sparse: csr_matrix
    starts: npt.NDArray[np.intp]
    labels: Array

    def fitted(self, strength: float) -> Coefficients:
        """The coefficients with the lowest loss, as scikit-learn's LogisticRegression has it for
        C = `strength`: the rows' losses and half the squared coefficients over C, the bias free.
        """
        width, columns = self.dense.shape[1], self.sparse.shape[1]

        def loss_and_gradient(point: Array) -> tuple[float, Array]:
            weights, bias = point[:-1], point[-1]
            logits = self.dense @ weights[:width] + self.sparse @ weights[width:]
            pooled, shares = self._pooled(logits)
            pooled += bias
            loss = np.logaddexp(0, pooled) - self.labels * pooled
            slopes = expit(pooled) - self.labels  # of each row's loss, by its logit
            span_slopes = shares * np.repeat(slopes, self._counts)
            gradient = np.concatenate(
                [self.dense.T @ span_slopes, self._by_column @ span_slopes, [slopes.sum()]]
            )
            gradient[:-1] += weights / strength
            penalty = weights @ weights / (2 * strength)
            rows = len(self.labels)
            return float(loss.sum() + penalty) / rows, gradient / rows

        # At MiniLM's width two threads take three times as long (docs/lessons.md).
        with threadpool_limits(1, "blas"):
            best = minimize(
                loss_and_gradient,
                np.zeros(width + columns + 1),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": MOST_STEPS, "gtol": TOLERANCE, "ftol": 0.0},
            ).x
        return Coefficients(best[:width], best[width:-1], float(best[-1]))

    def _pooled(self, logits: Array) -> tuple[Array, Array]:
        """The smooth maximum of each row's spans, and how much each span changes it, [spans]."""
        highest = np.maximum.reduceat(logits, self.starts)
        odds = np.exp((logits - np.repeat(highest, self._counts)) / TEMPERATURE)
        sums = np.add.reduceat(odds, self.starts)
        return highest + TEMPERATURE * np.log(sums), odds / np.repeat(sums, self._counts)

    @cached_property
    def _counts(self) -> npt.NDArray[np.intp]:
        return np.diff(self.starts, append=len(self.dense))

    @cached_property
    def _by_column(self) -> csr_matrix:
        return self.sparse.T.tocsr()
