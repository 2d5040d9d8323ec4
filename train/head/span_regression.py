"""A logistic regression on rows of several spans, of which the highest logit counts. Knows nothing
of prompts or words.

A maximum teaches a row's highest span alone, and a fit that picks spans and fits to them in turns
need not settle (docs/lessons.md). So the maximum is smoothed while it is fitted:

    logit of a row = T log(sum over its spans of exp(logit of the span / T)) + bias

It is above the maximum by at most T log(spans). For one span it is that span's logit, and the fit
is the plain logistic regression. Multiple-instance learning with log-sum-exp: Ramon and De Raedt,
2000.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit
from threadpoolctl import threadpool_limits

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
    """The spans of all rows, one row's after another's: `dense` [spans, width] and `sparse` [spans,
    columns]. `starts` [rows] is the index of each row's first span; every row has one. `labels`
    [rows] are 0 or 1.
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
