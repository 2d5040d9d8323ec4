"""Trains heads: a logistic regression on the frozen base's states and the conversation's words,
without any adapter.

A decoder has one state: after its final norm, at the prompt's last token. An encoder has one state
a span, and the span with the highest logit counts (`SpanRows`). The validation loss
chooses the weight of the words and the strength of the regularisation. With few own rows beside
generated rows the head is a weighted mean of all fits. Knows nothing of thresholds, cards or files
of examples."""

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
from scipy.special import softmax
from sklearn.model_selection import StratifiedGroupKFold
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.calibration_rows import own_rows_decide
from guard.errors import GuardError, did_you_mean
from guard.method import METHODS
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import NgramRows, NgramVocabulary, ngram_rows
from guard.weights.head import NO_WORDS, Head, WordWeights, mean_head
from train.base import by_onednn, load_served_base
from train.batch import by_length, left_padded, pass_tokens
from train.examples import Row, Rows, has_of_each_label
from train.head.regression import (
    ReadRows,
    Regression,
    RowSpans,
    SpansReader,
    head_logits,
    read_rows,
)
from train.job import Job

# Own training rows of either label, openings among them: with fewer, all rows are one fit.
FEWEST_OWN = 5
FOLDS = 5  # the most folds in which rows' words are held out

Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True)
class TrainedHead:
    """A job's head, and the reader of its spans. `validation_logits` come from a head that has not
    seen the validation rows. `head` itself may have seen them.
    """

    method: str
    head: Head
    reader: SpansReader
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Raw logits of `prompts` in nats, with the states of plain transformers."""
        return head_logits(self.head, self.reader(prompts))

    def save(self, folder: Path) -> None:
        """Write the safetensors file that the method names."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.head.tensors(), folder / METHODS[self.method].weights)


def fit(jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """The heads of `jobs`, all on one decoder, in order; see `fit_on`."""
    recipe = jobs[0][0].recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_served_base(recipe, device)

    def reader_of(job: Job) -> SpansReader:
        return lambda prompts: decoder_spans(job, states(base, prompts), prompts)

    yield from fit_on(reader_of, jobs)


def decoder_spans(job: Job, states: np.ndarray, prompts: Sequence[Prompt]) -> list[RowSpans]:
    """What a job's head reads of each prompt: its one state, of `states` [prompts, hidden size],
    and the words that count.
    """
    spans: list[RowSpans] = []
    for state, prompt in zip(states, prompts, strict=True):
        spans.append(RowSpans(state[None], judged_words(job, prompt)))
    return spans


def judged_words(job: Job, prompt: Prompt) -> NgramRows:
    prefix = prompt.token_ids[: prompt.invocation_start]
    return ngram_rows([job.builder.judged_ids(prefix, job.reads)])


def fit_on(
    reader_of: Callable[[Job], SpansReader], jobs: Sequence[tuple[Job, Rows]]
) -> Iterator[TrainedHead | GuardError]:
    """The heads of `jobs` in order, each on the spans that its reader gives. The same rows give the
    same weights on one machine.
    """
    for job, rows in jobs:
        job.open_scratch()
        try:
            yield fitted(job, rows, reader_of(job))
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


def fitted(job: Job, rows: Rows, reader: SpansReader) -> TrainedHead:
    """The head of one job. Beside generated rows enough own rows have a head of their own
    (`fitted_to_own_rows`). Otherwise the fit with the lowest validation loss is the head. Raises
    GuardError for states that are not finite.
    """
    train = read_rows(job, reader, rows.train)
    validation = read_rows(job, reader, rows.validation)
    vocabulary = train.vocabulary()
    if own_rows_suffice(job, rows):
        generated = Regression(train.generated(), vocabulary)
        prior = _mixed(job, generated, validation.generated()).head
        head, before = fitted_to_own_rows(job, prior, train.own(), validation.own())
        return TrainedHead(job.method, head, reader, head_logits(before, validation.spans))
    head = _mixed(job, Regression(train, vocabulary), validation).head
    return TrainedHead(job.method, head, reader, head_logits(head, validation.spans))


def own_rows_suffice(job: Job, rows: Rows) -> bool:
    """Whether a head can be fitted to the own rows alone, after a head of the generated rows. The
    threshold then comes from own rows too, so both need enough own rows.
    """
    generated = rows.generated()
    return (
        own_rows_decide(rows.validation, job.rule.max_fpr)
        and has_of_each_label(rows.own().train, FEWEST_OWN)
        and has_of_each_label(generated.train, 1)
        and has_of_each_label(generated.validation, 1)
    )


def fitted_to_own_rows(
    job: Job, prior: Head, train: ReadRows, validation: ReadRows
) -> tuple[Head, Head]:
    """Two heads of the own rows. The first is fitted to training and validation rows. The second is
    fitted to the training rows alone: its logits of the validation rows set the threshold.

    Both heads read the logit of `prior`, a head of the generated rows or of all rows. In one fit
    many generated rows outweigh a few own rows. With few rows a validation loss says little about
    which settings are best. So a head is the mean of all fits and the prior. The likelihood of the
    validation rows under a fit is its weight (pseudo-BMA weights: Yao et al., 2018).
    docs/lessons.md has the gain of each step.
    """
    vocabulary = prior.words.vocabulary
    mixed = _mixed(job, Regression(train, vocabulary, prior), validation)
    rows, spans = [*train.rows, *validation.rows], [*train.spans, *validation.spans]
    refitted = Regression(ReadRows(rows, spans), vocabulary, prior)
    return mixed.again(refitted), mixed.head


class Mixed(NamedTuple):
    """The mean of fits with these settings (word scale, C) and last of their prior, `shares` of
    each.
    """

    head: Head
    settings: Sequence[tuple[float, float]]
    shares: npt.NDArray[np.float64]

    def again(self, regression: Regression) -> Head:
        return mean_head(regression.fits(self.settings), self.shares)


def _mixed(job: Job, regression: Regression, validation: ReadRows) -> Mixed:
    """The fit with the lowest validation loss; with a prior a share of each fit and of the prior,
    by the likelihood of the validation rows.
    """
    settings = settings_to_try(job, regression.vocabulary)
    heads = regression.fits(settings)
    losses = np.array([validation.loss(head) for head in heads])
    if regression.prior is None:
        best = int(np.argmin(losses))
        return Mixed(heads[best], [settings[best]], np.ones(1))
    shares = softmax(-losses * len(validation.rows))
    return Mixed(mean_head(heads, shares), settings, shares)


class HeldOutWords(NamedTuple):
    """The words of a fit that has not seen a row. `offset` says how many nats this fit is above the
    fit to all rows, both at the mean state and without words.
    """

    words: WordWeights = NO_WORDS
    offset: float = 0.0


def fitted_with_held_out_words(
    job: Job, rows: Rows, reader: SpansReader, prior: Head | None = None
) -> tuple[TrainedHead, list[HeldOutWords]]:
    """The fit to all rows alike, generated or own, which may read the logit of a `prior`; and words
    for each training row. These words come from a fit with the same settings to the rows of the
    other folds. Where the other folds have one label, a row has no words.
    """
    train = read_rows(job, reader, rows.train)
    validation = read_rows(job, reader, rows.validation)
    mixed = _mixed(job, Regression(train, train.vocabulary(), prior), validation)
    head = mixed.head
    trained = TrainedHead(job.method, head, reader, head_logits(head, validation.spans))
    held_out = [HeldOutWords()] * len(train.rows)
    if not head.words:
        return trained, held_out
    labels = np.array(train.labels)
    mean_state = np.concatenate([row.states for row in train.spans]).mean(axis=0, dtype=np.float64)
    for other_indices, fold in _folds(rows.train, labels):
        if len(np.unique(labels[other_indices])) == 1:
            continue
        other_rows = train.at(other_indices)
        fold_head = mixed.again(Regression(other_rows, other_rows.vocabulary(), prior))
        offset = float((fold_head.weight - head.weight) @ mean_state) + fold_head.bias - head.bias
        for index in fold:
            held_out[index] = HeldOutWords(fold_head.words, offset)
    return trained, held_out


def _folds(rows: Sequence[Row], labels: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """For each fold the indices of the other rows and of its own rows. A group is never cut, and a
    fold has its share of both labels. There is no fold where all rows are of one group, or a label
    has one row.
    """
    groups = [row.group or row.id for row in rows]
    parts = min(FOLDS, len(set(groups)), *np.bincount(labels))
    if parts < 2:
        return
    yield from StratifiedGroupKFold(parts).split(groups, labels, groups)


STRENGTH = "C"  # a key of a recipe's `head`: scikit-learn's inverse of the regularisation
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # unless the recipe states one, from the strongest on
WORD_SCALES = (1.0, 3.0)  # what TF-IDF is multiplied by beside the states


def check_head(job: Job) -> None:
    """Raise GuardError for settings that a head does not read."""
    for key in ("lora", "trainer", "early_stopping_patience", "min_steps"):
        if getattr(job.settings, key):
            problem = f"a head does not use {key} settings"
            raise GuardError(problem, where=job.where(key), remedy="Remove them")
    check_fit_settings(job)


def check_fit_settings(job: Job) -> None:
    """Raise GuardError for settings that no head reads, alone or beside an adapter."""
    where = job.where("head")
    for key, value in (job.settings.head or {}).items():
        if key != STRENGTH:
            remedy = did_you_mean(key, [STRENGTH]) or f"Only {STRENGTH} can be set"
            raise GuardError(f"unknown key '{key}' of a head", where=where, remedy=remedy)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            problem = f"{STRENGTH} must be a positive number"
            remedy = "Name a number above 0, or leave it out: then the validation rows choose"
            raise GuardError(problem, where=where, got=value, remedy=remedy)


def settings_to_try(job: Job, vocabulary: NgramVocabulary) -> list[tuple[float, float]]:
    """The pairs of word scale and C to try."""
    scales = WORD_SCALES if vocabulary.keys.size else WORD_SCALES[:1]
    stated = (job.settings.head or {}).get(STRENGTH)
    strengths = STRENGTHS if stated is None else (stated,)
    return list(itertools.product(scales, strengths))
