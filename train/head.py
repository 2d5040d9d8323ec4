"""Trains heads: a logistic regression on the frozen base's states and the conversation's words,
without any adapter.

Of a decoder the state is that after its final norm, at the prompt's last token; an encoder gives
one for each span, of which the highest logit counts. Which span that is of a row, the rounds of a
fit find out. States are standardised for the regression and divided by the root of their length, so
that they weigh as much as the words, whose TF-IDF has length 1; what is written is folded back
(`guard/head.py`). How much the words weigh, how strongly all is regularised, and whether the head
reads all turns that count, the last of them, or both, is what has the lowest validation loss.
Knows nothing of thresholds, cards or files of examples.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from safetensors.numpy import save_file
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError, did_you_mean
from guard.head import Head, HeadStates
from guard.method import METHODS
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import LAST_TURN, Ngrams, Vocabulary, ngrams_of
from guard.recipe import KINDS
from train.base import load_served_base
from train.batch import BATCH_TOKENS, by_length, left_padded
from train.calibration.validation import validation_loss
from train.examples import Row, Rows
from train.job import Job
from train.refusals import refusals

# Values of C, unless the recipe states one, from the strongest regularisation on.
STRENGTHS = (0.1, 1.0, 10.0, 100.0)
WORD_SCALES = (1.0, 3.0)  # what TF-IDF is multiplied by beside the states
DEFAULTS = {"max_iter": 2000}  # sklearn's 100 do not converge for a large C
ROUNDS = 3  # of a fit on rows with several states

# Of what a head's weights may be other than 0: all turns that count, the last of them, or both.
Scope = Literal["all", "last", "both"]


# Prompts -> the states of each.
Reader = Callable[[Sequence[Prompt]], list[HeadStates]]


class RowFeatures(NamedTuple):
    """All that a head reads of a prompt."""

    states: HeadStates
    words: Ngrams


@dataclass(frozen=True)
class TrainedHead:
    """A job's head, and what gives the states that it reads."""

    job: Job
    head: Head
    reader: Reader
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Raw logits of `prompts` in nats, with the states of plain transformers."""
        return _logits(self.head, features(self.job, self.reader, prompts))

    def save(self, folder: Path) -> None:
        """Write the safetensors file that the method names."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.head.tensors(), folder / METHODS[self.job.method].weights)


def check_head(job: Job) -> None:
    """Raise GuardError for settings that a head does not read or LogisticRegression refuses."""
    for key in ("lora", "trainer", "early_stopping_patience", "min_steps"):
        if getattr(job.settings, key):
            problem = f"a head does not use {key} settings"
            raise GuardError(problem, where=job.where(key), remedy="Remove them")
    where = job.where("head")
    arguments = inspect.signature(LogisticRegression).parameters
    for key in job.settings.head:
        if key not in arguments:
            remedy = did_you_mean(key, arguments) or "See LogisticRegression of sklearn"
            problem = f"unknown key '{key}' for LogisticRegression"
            raise GuardError(problem, where=where, remedy=remedy)
    with refusals("LogisticRegression", where):
        for settings in _settings(job):
            LogisticRegression(**settings).fit([[0.0], [1.0], [0.0], [1.0]], [0, 1, 0, 1])


def fit(jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Train the heads of `jobs`, all on one decoder, and yield them in order; see `fit_on`."""
    recipe = jobs[0][0].recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_served_base(recipe, device)

    def reader(prompts: Sequence[Prompt]) -> list[HeadStates]:
        return [HeadStates.of_prompt(state) for state in states(base, prompts)]

    yield from fit_on(reader, jobs)


def fit_on(reader: Reader, jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Train the heads of `jobs` on the states that `reader` gives, and yield them in order.

    The same rows give the same weights.
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


def features(
    job: Job, reader: Reader, prompts: Sequence[Prompt], has_words: bool = True
) -> list[RowFeatures]:
    """What a head of the job reads of `prompts`."""
    rows: list[RowFeatures] = []
    for prompt, states_of_row in zip(prompts, reader(prompts), strict=True):
        turns: list[list[int]] = []
        if has_words:
            prefix = prompt.token_ids[: prompt.invocation_start]
            turns = job.builder.turns(prefix, job.reads)
        rows.append(RowFeatures(states_of_row, ngrams_of(turns)))
    return rows


def fitted(job: Job, rows: Rows, reader: Reader, on_spans: bool = False) -> TrainedHead:
    """The head of one job: of all fits the one with the lowest validation loss, of equal ones the
    first.

    `on_spans`: without words, and without the last turn's state. Raises GuardError for states that
    are not finite.
    """
    train = features(job, reader, [row.prompt for row in rows.train], not on_spans)
    validation = features(job, reader, [row.prompt for row in rows.validation], not on_spans)
    if not all(np.isfinite(row.states.spans).all() for row in (*train, *validation)):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("the base's states are not finite", where=job.name, remedy=remedy)
    scopes: tuple[Scope, ...] = ("all",)
    if KINDS[job.recipe.kind].is_encoder and not on_spans:
        scopes = ("all", "last", "both")
    heads: list[TrainedHead] = []
    losses: list[float] = []
    for scope in scopes:
        regression = _Regression(job, train, np.array(_labels(rows.train)), scope)
        for word_scale, settings in itertools.product(WORD_SCALES, _settings(job)):
            head = regression.fitted(word_scale, settings)
            logits = _logits(head, validation)
            heads.append(TrainedHead(job, head, reader, logits))
            losses.append(validation_loss(logits, _labels(rows.validation)))
    return heads[int(np.argmin(losses))]


class _Regression:
    """The regressions of a job on its training rows, in one scope."""

    def __init__(
        self, job: Job, rows: Sequence[RowFeatures], labels: np.ndarray, scope: Scope
    ) -> None:
        self._job, self._labels, self._scope = job, labels, scope
        self._spans = [row.states.spans for row in rows]
        self._last = np.stack([row.states.last for row in rows])
        words = [_in_scope(row.words, scope) for row in rows]
        self._vocabulary = Vocabulary.of(words)
        self._tfidf = _matrix(self._vocabulary, words)

    def fitted(self, word_scale: float, settings: dict[str, Any]) -> Head:
        """With these settings of LogisticRegression.

        A row of several spans enters first with their mean, then with its highest under the last
        fit, as when it is judged.
        """
        chooses = self._scope != "last" and any(len(spans) > 1 for spans in self._spans)
        inputs = np.stack([spans.mean(axis=0) for spans in self._spans])
        for _ in range(ROUNDS if chooses else 1):
            head = self._fit_once(inputs, word_scale, settings)
            inputs = np.stack([spans[np.argmax(spans @ head.weight)] for spans in self._spans])
        return head

    def _fit_once(self, spans: np.ndarray, word_scale: float, settings: dict[str, Any]) -> Head:
        """On one span of each row, [rows, hidden size]."""
        dense = np.concatenate([spans, self._last], axis=1)
        width = spans.shape[1]
        columns = {"all": slice(width), "last": slice(width, None), "both": slice(None)}
        used = columns[self._scope]
        scaler = StandardScaler()
        states = scaler.fit_transform(dense[:, used]) / np.sqrt(width)
        inputs = hstack([csr_matrix(states), self._tfidf * word_scale]).tocsr()
        regression = LogisticRegression(**settings)
        with refusals("LogisticRegression", self._job.where("head")):
            regression.fit(inputs, self._labels)
        of_states, of_words = np.split(regression.coef_[0], [states.shape[1]])
        of_states = of_states / np.sqrt(width) / scaler.scale_
        bias = np.float32(regression.intercept_[0] - of_states @ scaler.mean_)
        weights = np.zeros(2 * width, np.float32)
        weights[used] = of_states
        return Head(
            weight=weights[:width],
            last_weight=weights[width:],
            bias=float(bias),
            vocabulary=self._vocabulary,
            ngram_weights=(of_words * word_scale).astype(np.float32),
        )


def _in_scope(words: Ngrams, scope: Scope) -> Ngrams:
    is_last = words.keys >= LAST_TURN
    if scope == "both":
        return words
    if scope == "all":
        is_last = ~is_last
    return Ngrams(words.keys[is_last], words.frequencies[is_last])


def _matrix(vocabulary: Vocabulary, rows: Sequence[Ngrams]) -> csr_matrix:
    """TF-IDF of rows, [rows, n-grams], sparse float64."""
    of_rows = [vocabulary.tfidf(row) for row in rows]
    ends = np.cumsum([0, *(len(indices) for indices, _ in of_rows)])
    indices = np.concatenate([indices for indices, _ in of_rows])
    values = np.concatenate([values for _, values in of_rows])
    return csr_matrix((values, indices, ends), shape=(len(rows), len(vocabulary.keys)))


def _settings(job: Job) -> list[dict[str, Any]]:
    stated = DEFAULTS | job.settings.head
    if "C" in stated:
        return [stated]
    return [stated | {"C": strength} for strength in STRENGTHS]


def _logits(head: Head, rows: Sequence[RowFeatures]) -> list[float]:
    return [head.logit(row.states, row.words) for row in rows]


def _labels(rows: Sequence[Row]) -> list[int]:
    return [row.label for row in rows]
