"""Trains heads: a logistic regression on the frozen base's states and the conversation's words,
without any adapter.

Of a decoder the state is that after its final norm, at the prompt's last token; an encoder gives
one for each span, of which the highest logit counts (`span_regression.py`). States are standardised
for the regression and divided by the root of their length, so that they weigh as much as the words,
whose TF-IDF has length 1; what is written is folded back (`guard/head.py`). How much the words
weigh and how strongly all is regularised is what has the lowest validation loss. Knows nothing of
thresholds, cards or files of examples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from scipy.sparse import csr_matrix
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError, did_you_mean
from guard.head import NO_WORDS, Head, WordWeights
from guard.method import METHODS
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import NgramRows, NgramVocabulary, ngram_rows
from train.base import load_served_base
from train.batch import BATCH_TOKENS, by_length, left_padded
from train.calibration.validation import validation_loss
from train.examples import Row, Rows
from train.job import Job
from train.span_regression import SpanRows

STRENGTH = "C"  # of a recipe's `head`: the inverse of the regularisation, as scikit-learn has it
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # unless the recipe states one, from the strongest on
WORD_SCALES = (1.0, 3.0)  # what TF-IDF is multiplied by beside the states
FOLDS = 5  # of the rows whose words are held out, at most

Numbers = npt.NDArray[np.intp]


class RowSpans(NamedTuple):
    """What a head reads of a prompt: the states of its spans, [spans, hidden size] float32, and the
    words of each.
    """

    states: np.ndarray
    words: NgramRows


# Prompts -> the spans of each.
Reader = Callable[[Sequence[Prompt]], list[RowSpans]]


@dataclass(frozen=True)
class TrainedHead:
    """A job's head, and what gives the spans that it reads."""

    method: str
    head: Head
    reader: Reader
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Raw logits of `prompts` in nats, with the states of plain transformers."""
        return _logits(self.head, self.reader(prompts))

    def save(self, folder: Path) -> None:
        """Write the safetensors file that the method names."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.head.tensors(), folder / METHODS[self.method].weights)


def check_head(job: Job) -> None:
    """Raise GuardError for settings that a head does not read."""
    for key in ("lora", "trainer", "early_stopping_patience", "min_steps"):
        if getattr(job.settings, key):
            problem = f"a head does not use {key} settings"
            raise GuardError(problem, where=job.where(key), remedy="Remove them")
    where = job.where("head")
    for key, value in job.settings.head.items():
        if key != STRENGTH:
            remedy = did_you_mean(key, [STRENGTH]) or f"Only {STRENGTH} can be set"
            raise GuardError(f"unknown key '{key}' of a head", where=where, remedy=remedy)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            remedy = "Name a number above 0, or leave it out: then the validation rows choose"
            raise GuardError(f"{STRENGTH} is no strength", where=where, got=value, remedy=remedy)


def fit(jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Train the heads of `jobs`, all on one decoder, and yield them in order; see `fit_on`."""
    recipe = jobs[0][0].recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_served_base(recipe, device)

    def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
        rows: list[RowSpans] = []
        for prompt, state in zip(prompts, states(base, prompts), strict=True):
            conversation = prompt.token_ids[: prompt.invocation_start]
            rows.append(RowSpans(state[None], ngram_rows([conversation])))
        return rows

    yield from fit_on(reader, jobs)


def fit_on(reader: Reader, jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Train the heads of `jobs` on the spans that `reader` gives, and yield them in order.

    The same rows give the same weights on one machine.
    """
    for job, rows in jobs:
        job.open_scratch()
        try:
            yield fitted(job, rows, reader)
        except GuardError as error:
            yield error


def states(base: PreTrainedModel, prompts: Sequence[Prompt]) -> np.ndarray:
    """The base's last state at each prompt's last token, `[prompts, hidden size]` float32."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    width = base.config.get_text_config().hidden_size
    last = np.empty((len(prompts), width), dtype=np.float32)
    bar = tqdm(total=sum(lengths), desc="states", unit="token", unit_scale=True, leave=False)
    with torch.inference_mode(), bar:
        for batch in by_length(lengths, BATCH_TOKENS):
            tensors = left_padded([prompts[index].token_ids for index in batch])
            on_device = {name: tensor.to(base.device) for name, tensor in tensors.items()}
            output = cast(Any, base.base_model)(**on_device, use_cache=False)
            last[batch] = output.last_hidden_state[:, -1].float().cpu().numpy()
            bar.update(sum(lengths[index] for index in batch))
    return last


def fitted(job: Job, rows: Rows, reader: Reader) -> TrainedHead:
    """The head of one job: of all fits the one with the lowest validation loss, of equal ones the
    first.

    Raises GuardError for states that are not finite.
    """
    return _chosen(job, rows, reader, _read(reader, rows.train))[0]


class HeldOutWords(NamedTuple):
    """What words say of a row to a fit that has not seen it, and by how many nats that fit is above
    the one to all rows at the mean state without words.
    """

    words: WordWeights = NO_WORDS
    offset: float = 0.0


def fitted_with_held_out_words(
    job: Job, rows: Rows, reader: Reader
) -> tuple[TrainedHead, list[HeldOutWords]]:
    """As `fitted`, and for each training row the words of a fit with the same settings to the rows
    of other folds; none where these have one label.
    """
    spans = _read(reader, rows.train)
    chosen, settings = _chosen(job, rows, reader, spans)
    held_out = [HeldOutWords()] * len(spans)
    if not chosen.head.words:
        return chosen, held_out
    labels = np.array(_labels(rows.train))
    mean = np.concatenate([row.states for row in spans]).mean(axis=0, dtype=np.float64)
    for others, fold in _folds(rows.train, labels):
        if len(np.unique(labels[others])) == 1:
            continue
        head = _Regression([spans[index] for index in others], labels[others]).fitted(*settings)
        # Both biases where the states say nothing.
        offset = float((head.weight - chosen.head.weight) @ mean) + head.bias - chosen.head.bias
        for index in fold:
            held_out[index] = HeldOutWords(head.words, offset)
    return chosen, held_out


def _folds(rows: Sequence[Row], labels: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """The indices of the other rows and of a fold's, for each: groups are whole, and either label
    has its share. None where all rows are of one group, or a label has one row.
    """
    groups = [row.group or row.id for row in rows]
    parts = min(FOLDS, len(set(groups)), *np.bincount(labels))
    if parts < 2:
        return
    yield from StratifiedGroupKFold(parts).split(groups, labels, groups)


def _read(reader: Reader, rows: Sequence[Row]) -> list[RowSpans]:
    return reader([row.prompt for row in rows])


def _chosen(
    job: Job, rows: Rows, reader: Reader, train: Sequence[RowSpans]
) -> tuple[TrainedHead, tuple[float, float]]:
    """The head with the lowest validation loss, and its settings: word scale and strength."""
    validation = _read(reader, rows.validation)
    if not all(np.isfinite(row.states).all() for row in (*train, *validation)):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("the base's states are not finite", where=job.name, remedy=remedy)
    regression = _Regression(train, _labels(rows.train))
    scales = WORD_SCALES if regression.vocabulary.keys.size else WORD_SCALES[:1]
    heads: list[TrainedHead] = []
    losses: list[float] = []
    settings = list(itertools.product(scales, _strengths(job)))
    for word_scale, strength in settings:
        head = regression.fitted(word_scale, strength)
        logits = _logits(head, validation)
        heads.append(TrainedHead(job.method, head, reader, logits))
        losses.append(validation_loss(logits, _labels(rows.validation)))
    best = int(np.argmin(losses))
    return heads[best], settings[best]


class _Regression:
    """The regressions of a job on the spans of its training rows."""

    def __init__(self, rows: Sequence[RowSpans], labels: npt.ArrayLike) -> None:
        states = np.concatenate([row.states for row in rows]).astype(np.float64)
        counts = np.array([len(row.states) for row in rows])
        self._starts = np.cumsum(counts) - counts
        self._labels = np.array(labels, np.float64)
        self._scaler = StandardScaler(copy=False)
        self._states = self._scaler.fit_transform(states)
        self._states /= np.sqrt(states.shape[1])
        self.vocabulary = NgramVocabulary.of([row.words for row in rows])
        self._words = self._tfidf([row.words for row in rows])

    def fitted(self, word_scale: float, strength: float) -> Head:
        """With TF-IDF multiplied by `word_scale`."""
        words = self._words * word_scale
        rows = SpanRows(self._states, words, self._starts, self._labels)
        of_states, of_words, bias = rows.fitted(strength)
        weight = of_states / np.sqrt(len(of_states)) / self._scaler.scale_
        return Head(
            weight=weight.astype(np.float32),
            bias=float(np.float32(bias - weight @ self._scaler.mean_)),
            words=WordWeights(self.vocabulary, (of_words * word_scale).astype(np.float32)),
        )

    def _tfidf(self, words: Sequence[NgramRows]) -> csr_matrix:
        """Of all rows' spans, [spans, n-grams]."""
        shape = (len(self._states), len(self.vocabulary.keys))
        rows, ngrams, values = [], [], []
        for start, of_row in zip(self._starts, words, strict=True):
            tfidf = self.vocabulary.tfidf(of_row)
            rows.append(start + tfidf.rows)
            ngrams.append(tfidf.ngrams)
            values.append(tfidf.values)
        places = np.concatenate(rows), np.concatenate(ngrams)
        return csr_matrix((np.concatenate(values), places), shape=shape)


def _strengths(job: Job) -> Sequence[float]:
    stated = job.settings.head.get(STRENGTH)
    return STRENGTHS if stated is None else (stated,)


def _logits(head: Head, rows: Sequence[RowSpans]) -> list[float]:
    return [head.logit(row.states.astype(np.float64), row.words) for row in rows]


def _labels(rows: Sequence[Row]) -> list[int]:
    return [row.label for row in rows]
