"""The bag-of-words baseline, what can be had without a model: TF-IDF with logistic regression.

Which text it reads, which n-grams it counts and how strongly it is regularised is chosen by the
AUROC on the validation split; probability and threshold come from there too. The few rows of one's
own beside generated ones choose worse than all (docs/lessons.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from eval import metrics
from eval.answers import Answer
from guard.calibrate import calibrate
from guard.calibration_rows import for_calibration, own_rows_decide
from guard.conversation.example import Example
from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.prompt.text import visible
from guard.rule import SPEAKERS, Reads, Rule
from guard.twins import of_twins
from guard.verdict import Calibration

WORD = r"(?u)\w+"


def _judged_turns(example: Example, reads: Reads) -> list[str]:
    return [turn.content for turn in example.messages if turn.role in SPEAKERS[reads]]


# The parts of a conversation that can be read.
VIEWS: dict[str, Callable[[Example, Reads], list[str]]] = {
    "whole conversation": lambda example, reads: [turn.content for turn in example.messages],
    "judged speaker": _judged_turns,
    "last turn": lambda example, reads: _judged_turns(example, reads)[-1:],
}
BLOCKS: dict[str, dict[str, Any]] = {  # of scikit-learn's CountVectorizer
    "words 1-2": {"token_pattern": WORD, "ngram_range": (1, 2)},
    "words 1-3": {"token_pattern": WORD, "ngram_range": (1, 3)},
    "characters 2-5": {"analyzer": "char_wb", "ngram_range": (2, 5)},
}
NGRAMS: dict[str, tuple[str, ...]] = {  # by name: the blocks that stand side by side
    "words 1-2": ("words 1-2",),
    "words 1-3": ("words 1-3",),
    "words 1-2 and characters 2-5": ("words 1-2", "characters 2-5"),
}


class Block:
    """TF-IDF of one kind of n-gram, rows of length 1, of those that several texts have."""

    def __init__(self, name: str, training: Sequence[str]) -> None:
        self._counts = CountVectorizer(**BLOCKS[name])
        counts = self._counts.fit_transform(training)
        texts_with = np.bincount(counts.indices, minlength=counts.shape[1])
        self._kept = np.flatnonzero(texts_with >= min(2, texts_with.max()))
        self._weights = TfidfTransformer(sublinear_tf=True)
        self.training = self._weights.fit_transform(counts[:, self._kept])

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        return self._weights.transform(self._counts.transform(texts)[:, self._kept])


def text_of(example: Example, view: str, reads: Reads) -> str:
    return "\n".join(visible(content) for content in VIEWS[view](example, reads))


# C of the logistic regression, the inverse of its regularisation.
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
REMEDY = "Run `make data` for this rule, or check the rows"


class BagVariant(Strict):
    """What was chosen, and the AUROC on the validation split that it was chosen by."""

    view: str
    ngrams: str
    c: float
    validation_auroc: float

    def __str__(self) -> str:
        return f"{self.view}, {self.ngrams}, C = {self.c:g}"


@dataclass(frozen=True)
class BagOfWords:
    """A fitted baseline: the chosen variant, its features and weights, how its logits are read."""

    variant: BagVariant
    reads: Reads
    blocks: tuple[Block, ...]
    model: LogisticRegression
    calibration: Calibration

    def answers(self, examples: Sequence[Example]) -> list[Answer]:
        answers = []
        for logit in self.logits(examples):
            p_violation = self.calibration.p_violation(logit)
            answers.append(Answer(p_violation >= self.calibration.threshold, logit, p_violation))
        return answers

    def logits(self, examples: Sequence[Example]) -> list[float]:
        """In nats, uncalibrated, one per example, in order."""
        texts = [text_of(example, self.variant.view, self.reads) for example in examples]
        features = hstack([block.transform(texts) for block in self.blocks]).tocsr()
        logits: list[float] = self.model.decision_function(features).tolist()
        return logits


def fit_bag_of_words(
    train: Sequence[Example], validation: Sequence[Example], rule: Rule
) -> BagOfWords:
    """The best variant on the validation split, the first of equals, trained on the training split.
    Where your own rows alone are calibrated on, the few of them beside generated ones, it is fitted
    again to training and validation rows after that, as a head is (`train/head/fit.py`). Raises
    GuardError where a split lacks rows of a label, or the training rows have no words that differ.
    """
    for split, rows in (("training", train), ("validation", validation)):
        if len({example.label for example in rows}) < 2:
            problem = (
                f"the {split} rows have one label: nothing to fit the bag-of-words baseline on"
            )
            raise GuardError(problem, got=f"{len(rows)} rows", remedy=REMEDY)
    candidates = _candidates(train, validation, rule.reads)
    best = max(
        candidates, key=lambda it: it[0].validation_auroc, default=None
    )  # the first of equals
    if best is None:
        raise GuardError("the training rows have no words that differ", remedy=REMEDY)
    variant, blocks, model, logits = best
    calibrated_on = for_calibration(logits.tolist(), validation, rule.max_fpr)
    twins = of_twins(logits.tolist(), validation), rule.max_fpr_twins
    calibration = calibrate(*calibrated_on, rule.max_fpr, None, *twins)
    if own_rows_decide(validation, rule.max_fpr):
        blocks, model = _fitted(variant, [*train, *validation], rule.reads)
    return BagOfWords(variant, rule.reads, blocks, model, calibration)


def _fitted(
    variant: BagVariant, rows: Sequence[Example], reads: Reads
) -> tuple[tuple[Block, ...], LogisticRegression]:
    texts = [text_of(row, variant.view, reads) for row in rows]
    blocks = tuple(Block(name, texts) for name in NGRAMS[variant.ngrams])
    features = hstack([block.training for block in blocks]).tocsr()
    return blocks, _regression(features, [row.label for row in rows], variant.c)


def _regression(features: csr_matrix, labels: Sequence[int], c: float) -> LogisticRegression:
    """Fitted by one thread: two take twice as long for vectors this short."""
    with threadpool_limits(1, "blas"):
        return LogisticRegression(max_iter=1000, C=c).fit(features, labels)


def _candidates(
    train: Sequence[Example], validation: Sequence[Example], reads: Reads
) -> Iterator[tuple[BagVariant, tuple[Block, ...], LogisticRegression, np.ndarray]]:
    """Every variant: its blocks, its model, its validation logits."""
    train_labels = [example.label for example in train]
    labels = [example.label for example in validation]
    for view, training, held_out in _views(train, validation, reads):
        by_name = {name: Block(name, training) for name in BLOCKS}
        for ngrams, names in NGRAMS.items():
            blocks = tuple(by_name[name] for name in names)
            features = hstack([block.training for block in blocks]).tocsr()
            held_out_features = hstack([block.transform(held_out) for block in blocks]).tocsr()
            for c in STRENGTHS:
                model = _regression(features, train_labels, c)
                logits = model.decision_function(held_out_features)
                auroc = metrics.auroc(labels, logits) or 0.0
                variant = BagVariant(view=view, ngrams=ngrams, c=c, validation_auroc=auroc)
                yield variant, blocks, model, logits


def _views(
    train: Sequence[Example], validation: Sequence[Example], reads: Reads
) -> Iterator[tuple[str, list[str], list[str]]]:
    """The views with words that differ, none twice: name, training and validation texts."""
    seen: list[list[str]] = []
    for view in VIEWS:
        training = [text_of(example, view, reads) for example in train]
        has_words = len({tuple(re.findall(WORD, text.lower())) for text in training}) > 1
        if has_words and training not in seen:
            seen.append(training)
            yield view, training, [text_of(example, view, reads) for example in validation]
