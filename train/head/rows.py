"""Training and validation rows with what a head reads of each. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from guard.errors import GuardError
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import NgramRows, NgramVocabulary
from guard.weights.head import Head
from train.calibration.validation import validation_loss
from train.examples import Row
from train.job import Job


class RowSpans(NamedTuple):
    """What a head reads of a prompt: the states of its spans, [spans, hidden size] float32, and the
    words of each.
    """

    states: np.ndarray
    words: NgramRows


# Prompts -> the spans of each.
Reader = Callable[[Sequence[Prompt]], list[RowSpans]]


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

    def joined_with(self, added: ReadRows) -> ReadRows:
        return ReadRows([*self.rows, *added.rows], [*self.spans, *added.spans])

    def vocabulary(self) -> NgramVocabulary:
        return NgramVocabulary.of([spans.words for spans in self.spans])


def read_rows(job: Job, reader: Reader, rows: Sequence[Row]) -> ReadRows:
    """The rows with their spans. Raises GuardError for states that are not finite."""
    spans = reader([row.prompt for row in rows])
    if not all(np.isfinite(row.states).all() for row in spans):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("the base's states are not finite", where=job.name, remedy=remedy)
    return ReadRows(rows, spans)


def head_logits(head: Head, rows: Sequence[RowSpans]) -> list[float]:
    return [head.logit(row.states.astype(np.float64), row.words) for row in rows]
