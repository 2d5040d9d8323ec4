"""Fits heads to the spans of training rows. Knows nothing of jobs, or of how settings are chosen.

States are standardised for the regression and divided by the root of their length, so that they
weigh as much as the words, whose TF-IDF has length 1; what is written is folded back
(`guard/weights/head.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.preprocessing import StandardScaler

from guard.prompt.ngrams import NgramRows, NgramVocabulary
from guard.weights.head import Head, WordWeights
from train.head.rows import ReadRows
from train.head.span_regression import SpanRows

PRIOR_SCALE = 0.3  # what a prior's standardised logit is multiplied by beside the states


class Regression:
    """The regressions of a job on the spans of its training rows.

    A `prior` is a head with the same vocabulary; its logit of a span is one more number beside the
    span's states (hypothesis transfer learning: Kuzborskij and Orabona, 2013). The fitted head adds
    the prior's weights to its own, so it is one head again.
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
        self._prior = prior
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
        return [self.fitted(word_scale, strength) for word_scale, strength in settings]

    def fitted(self, word_scale: float, strength: float) -> Head:
        """The head that is fitted with TF-IDF multiplied by `word_scale` and C = `strength`."""
        rows = SpanRows(self._dense, self._tfidf * word_scale, self._starts, self._labels)
        dense_weights, tfidf_weights, bias = rows.fitted(strength)
        width = len(self._scaler.scale_)
        weight = dense_weights[:width] / np.sqrt(width) / self._scaler.scale_
        bias -= float(weight @ self._scaler.mean_)
        word_weights = tfidf_weights * word_scale
        if self._prior is not None:
            share = float(PRIOR_SCALE * dense_weights[width] / self._prior_scaler.scale_[0])
            weight = weight + share * self._prior.weight
            word_weights = word_weights + share * self._prior.words.weights
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
