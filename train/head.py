"""Trains heads: a logistic regression on the frozen base's states and the conversation's words,
without any adapter.

Of a decoder the state is that after its final norm, at the prompt's last token; an encoder gives
one for each span, of which the highest logit counts (`span_regression.py`). States are standardised
for the regression and divided by the root of their length, so that they weigh as much as the words,
whose TF-IDF has length 1; what is written is folded back (`guard/head.py`). How much the words
weigh and how strongly all is regularised is what has the lowest validation loss; of a few rows of
one's own beside generated ones it is a mean. Knows nothing of
thresholds, cards or files of examples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from scipy.sparse import csr_matrix
from scipy.special import softmax
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.calibration_rows import own_rows_decide
from guard.errors import GuardError, did_you_mean
from guard.head import NO_WORDS, Head, WordWeights, mean_head
from guard.method import METHODS
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import NgramRows, NgramVocabulary, ngram_rows
from train.base import load_served_base
from train.batch import by_length, left_padded, pass_tokens
from train.calibration.validation import validation_loss
from train.examples import Row, Rows
from train.job import Job
from train.onednn import by_onednn
from train.span_regression import SpanRows

STRENGTH = "C"  # of a recipe's `head`: the inverse of the regularisation, as scikit-learn has it
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # unless the recipe states one, from the strongest on
WORD_SCALES = (1.0, 3.0)  # what TF-IDF is multiplied by beside the states
PRIOR_SCALE = 0.3  # what a prior's standardised logit is multiplied by beside the states
# Training rows of one's own of either label, openings among them: with fewer all rows are one fit.
FEWEST_OWN = 5
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
    """A job's head, and what gives the spans that it reads. Of a head that was fitted to its
    validation rows too the validation logits are those from before.
    """

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
    with torch.inference_mode(), by_onednn(base), bar:
        for batch in by_length(lengths, pass_tokens(base.device)):
            tensors = left_padded([prompts[index].token_ids for index in batch])
            on_device = {name: tensor.to(base.device) for name, tensor in tensors.items()}
            output = cast(Any, base.base_model)(**on_device, use_cache=False)
            last[batch] = output.last_hidden_state[:, -1].float().cpu().numpy()
            bar.update(sum(lengths[index] for index in batch))
    return last


def fitted(job: Job, rows: Rows, reader: Reader) -> TrainedHead:
    """The head of one job: of all fits the one with the lowest validation loss, of equal ones the
    first; `_fitted_to_own_rows` where some rows are generated and enough others are not.

    Raises GuardError for states that are not finite.
    """
    train, validation = _read(job, reader, rows.train), _read(job, reader, rows.validation)
    vocabulary = train.vocabulary()
    if _is_for_own_rows(job, train, validation):
        generated = _Regression(train.generated(), vocabulary)
        prior, _ = _chosen(job, generated, validation.generated())
        head, before = _fitted_to_own_rows(job, prior, train.own(), validation.own())
        return TrainedHead(job.method, head, reader, _logits(before, validation.spans))
    head, _ = _chosen(job, _Regression(train, vocabulary), validation)
    return TrainedHead(job.method, head, reader, _logits(head, validation.spans))


def _is_for_own_rows(job: Job, train: _ReadRows, validation: _ReadRows) -> bool:
    """Whether one's own rows are enough for a head of theirs, which forgets generated ones: then a
    threshold has to be for them, too.
    """
    is_generated = [row.is_generated for row in validation.rows]
    return (
        own_rows_decide(validation.labels, is_generated, job.rule.max_fpr)
        and train.own().has_of_each_label(FEWEST_OWN)
        and train.generated().has_of_each_label(1)
        and validation.generated().has_of_each_label(1)
    )


def _fitted_to_own_rows(
    job: Job, prior: Head, train: _ReadRows, validation: _ReadRows
) -> tuple[Head, Head]:
    """The head of one's own rows, which reads what `prior`, a head of generated rows, says; and the
    same before it was fitted to the validation rows, for them to be calibrated on.

    In one fit many generated rows outweigh a few of one's own. And of few rows a validation loss
    says little about which settings are best, so the head is the mean of all fits and the prior,
    each weighted by the likelihood of the validation rows under it (pseudo-BMA weights: Yao et al.,
    2018). With these weights it is fitted again to training and validation rows.
    docs/log/quality.md has what each step brings.
    """
    vocabulary = prior.words.vocabulary
    settings = _settings(job, vocabulary)
    regression = _Regression(train, vocabulary, prior)
    heads = [*regression.fits(settings), prior]
    losses = [validation.loss(head) * len(validation.rows) for head in heads]
    shares = softmax(-np.array(losses))
    regression = _Regression(train.and_those_of(validation), vocabulary, prior)
    of_all_rows = [*regression.fits(settings), prior]
    return mean_head(of_all_rows, shares), mean_head(heads, shares)


class HeldOutWords(NamedTuple):
    """What words say of a row to a fit that has not seen it, and by how many nats that fit is above
    the one to all rows at the mean state without words.
    """

    words: WordWeights = NO_WORDS
    offset: float = 0.0


def fitted_with_held_out_words(
    job: Job, rows: Rows, reader: Reader
) -> tuple[TrainedHead, list[HeldOutWords]]:
    """One fit to all rows alike, generated or not, with the settings of the lowest validation loss,
    and for each training row the words of a fit with the same settings to the rows of other folds;
    none where these have one label.
    """
    train, validation = _read(job, reader, rows.train), _read(job, reader, rows.validation)
    head, settings = _chosen(job, _Regression(train, train.vocabulary()), validation)
    chosen = TrainedHead(job.method, head, reader, _logits(head, validation.spans))
    held_out = [HeldOutWords()] * len(train.rows)
    if not head.words:
        return chosen, held_out
    labels = np.array(train.labels)
    mean = np.concatenate([row.states for row in train.spans]).mean(axis=0, dtype=np.float64)
    for other_rows, fold in _folds(rows.train, labels):
        if len(np.unique(labels[other_rows])) == 1:
            continue
        of_others = train.at(other_rows)
        fold_head = _Regression(of_others, of_others.vocabulary()).fitted(*settings)
        # Both biases where the states say nothing.
        offset = float((fold_head.weight - head.weight) @ mean) + fold_head.bias - head.bias
        for index in fold:
            held_out[index] = HeldOutWords(fold_head.words, offset)
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


@dataclass(frozen=True)
class _ReadRows:
    """Rows, and what a head reads of each."""

    rows: Sequence[Row]
    spans: Sequence[RowSpans]

    @property
    def labels(self) -> list[int]:
        return [row.label for row in self.rows]

    def has_of_each_label(self, count: int) -> bool:
        """Whether so many are allowed, and so many violate."""
        violating = sum(self.labels)
        return min(violating, len(self.rows) - violating) >= count

    def loss(self, head: Head) -> float:
        """The mean loss of a row in nats."""
        return validation_loss(_logits(head, self.spans), self.labels)

    def at(self, indices: Iterable[int]) -> _ReadRows:
        """The rows with these indices."""
        chosen = list(indices)
        return _ReadRows([self.rows[i] for i in chosen], [self.spans[i] for i in chosen])

    def generated(self) -> _ReadRows:
        """Those that are generated."""
        return self.at(i for i, row in enumerate(self.rows) if row.is_generated)

    def own(self) -> _ReadRows:
        """The others."""
        return self.at(i for i, row in enumerate(self.rows) if not row.is_generated)

    def and_those_of(self, added: _ReadRows) -> _ReadRows:
        """The rows of both."""
        return _ReadRows([*self.rows, *added.rows], [*self.spans, *added.spans])

    def vocabulary(self) -> NgramVocabulary:
        """Of all their words."""
        return NgramVocabulary.of([spans.words for spans in self.spans])


def _read(job: Job, reader: Reader, rows: Sequence[Row]) -> _ReadRows:
    """Raises GuardError for states that are not finite."""
    spans = reader([row.prompt for row in rows])
    if not all(np.isfinite(row.states).all() for row in spans):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("the base's states are not finite", where=job.name, remedy=remedy)
    return _ReadRows(rows, spans)


def _chosen(
    job: Job, regression: _Regression, validation: _ReadRows
) -> tuple[Head, tuple[float, float]]:
    """The head with the lowest validation loss, and its settings: word scale and strength."""
    settings = _settings(job, regression.vocabulary)
    heads = regression.fits(settings)
    best = int(np.argmin([validation.loss(head) for head in heads]))
    return heads[best], settings[best]


def _settings(job: Job, vocabulary: NgramVocabulary) -> list[tuple[float, float]]:
    """Word scales and strengths to try."""
    scales = WORD_SCALES if vocabulary.keys.size else WORD_SCALES[:1]
    stated = job.settings.head.get(STRENGTH)
    strengths = STRENGTHS if stated is None else (stated,)
    return list(itertools.product(scales, strengths))


class _Regression:
    """The regressions of a job on the spans of its training rows.

    With a `prior`, a head with the same vocabulary, what that says of a span is a number beside its
    states (hypothesis transfer learning: Kuzborskij and Orabona, 2013). Every head of this sort is
    a sum of two, so one head again.
    """

    def __init__(
        self, train: _ReadRows, vocabulary: NgramVocabulary, prior: Head | None = None
    ) -> None:
        states = np.concatenate([row.states for row in train.spans]).astype(np.float64)
        counts = np.array([len(row.states) for row in train.spans])
        self._starts = np.cumsum(counts) - counts
        self._labels = np.array(train.labels, np.float64)
        self._scaler = StandardScaler()
        self._dense = self._scaler.fit_transform(states) / np.sqrt(states.shape[1])
        self.vocabulary = vocabulary
        words = [row.words for row in train.spans]
        self._words = self._tfidf(words)
        self._prior = prior
        if prior is not None:
            of_rows = [
                prior.span_logits(row.states.astype(np.float64), row.words) for row in train.spans
            ]
            logits = np.concatenate(of_rows)[:, None]
            self._prior_scaler = StandardScaler().fit(logits)
            column = PRIOR_SCALE * self._prior_scaler.transform(logits)
            self._dense = np.concatenate([self._dense, column], axis=1)

    def fits(self, settings: Sequence[tuple[float, float]]) -> list[Head]:
        """Of all settings, word scale and strength, in their order."""
        return [self.fitted(word_scale, strength) for word_scale, strength in settings]

    def fitted(self, word_scale: float, strength: float) -> Head:
        """With TF-IDF multiplied by `word_scale`."""
        words = self._words * word_scale
        rows = SpanRows(self._dense, words, self._starts, self._labels)
        of_dense, of_words, bias = rows.fitted(strength)
        width = len(self._scaler.scale_)
        weight = of_dense[:width] / np.sqrt(width) / self._scaler.scale_
        bias -= float(weight @ self._scaler.mean_)
        word_weights = of_words * word_scale
        if self._prior is not None:
            share = float(PRIOR_SCALE * of_dense[width] / self._prior_scaler.scale_[0])
            weight = weight + share * self._prior.weight
            word_weights = word_weights + share * self._prior.words.weights
            bias -= share * float(self._prior_scaler.mean_[0])
        return Head(
            weight=weight.astype(np.float32),
            bias=float(np.float32(bias)),
            words=WordWeights(self.vocabulary, word_weights.astype(np.float32)),
        )

    def _tfidf(self, words: Sequence[NgramRows]) -> csr_matrix:
        """Of all rows' spans, [spans, n-grams]."""
        shape = (len(self._dense), len(self.vocabulary.keys))
        rows, ngrams, values = [], [], []
        for start, of_row in zip(self._starts, words, strict=True):
            tfidf = self.vocabulary.tfidf(of_row)
            rows.append(start + tfidf.rows)
            ngrams.append(tfidf.ngrams)
            values.append(tfidf.values)
        places = np.concatenate(rows), np.concatenate(ngrams)
        return csr_matrix((np.concatenate(values), places), shape=shape)


def _logits(head: Head, rows: Sequence[RowSpans]) -> list[float]:
    return [head.logit(row.states.astype(np.float64), row.words) for row in rows]
