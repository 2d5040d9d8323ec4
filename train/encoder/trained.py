"""A trained encoder: what it answers, how it is written, and its head fitted again to own rows.

An adapter is trained on all rows at once, so many generated rows outweigh a few own rows. With
enough own rows its head is therefore fitted again, to the own rows alone, as a head on the frozen
encoder is (`train/head/fit.py`). The head reads the adapter's states and the logit of the trained
head. The low-rank weights stay. The trained head knows the own rows and is too sure of them. A head
on an adapter of generated rows alone was no better (docs/lessons.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from safetensors.numpy import save_file
from torch import nn

from guard.method import WORDS
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from guard.weights.head import WordWeights
from train.adapter.trained import save_adapter
from train.encoder.bases import head_of, set_head
from train.encoder.model import read, row_spans, span_words, token_logits
from train.examples import Rows
from train.head.fit import fitted_to_own_rows, own_rows_suffice
from train.head.regression import RowSpans, head_logits, read_rows
from train.job import Job


@dataclass(frozen=True)
class TrainedEncoder:
    """A job's adapter and its head in PEFT's layers on the encoder. `words` are the
    word weights beside it. `validation_logits` set the threshold: where the head was fitted to
    validation rows too, they come from the head before that fit.
    """

    model: PeftModel
    job: Job
    words: WordWeights
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """The highest logit of each prompt's counting spans in nats, raw, through plain PEFT."""
        builder = cast(EncoderPromptBuilder, self.job.builder)
        windows = [builder.windows(prompt.token_ids, self.job.reads) for prompt in prompts]
        logits: list[float] = []
        all_span_logits = read(self.model, token_logits, builder, windows)
        for prompt_windows, span_logits in zip(windows, all_span_logits, strict=True):
            words = span_words(builder, prompt_windows, self.job.reads)
            logits.append(float((span_logits[:, 0] + self.words.logits(words)).max()))
        return logits

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, and the words; a head of the rule's own stands among the weights,
        as `classifier`.
        """
        save_adapter(self.model, self.job.recipe, folder)
        if self.words:
            save_file(self.words.tensors(), folder / WORDS)


def with_head_of_own_rows(trained: TrainedEncoder, rows: Rows) -> TrainedEncoder:
    """Fit the head of `trained` to the own rows, in place. Two adapters stay as they are: with too
    few own rows, without generated rows. The last fit reads the validation rows too, so the
    validation logits come from the head before it. Raises GuardError for states that are not
    finite.
    """
    job = trained.job
    if not own_rows_suffice(job, rows):
        return trained
    reader = functools.partial(adapted_spans, trained)
    base = cast(Any, trained.model.get_base_model())
    classifier: nn.Linear = base.classifier.modules_to_save["default"]  # PEFT's trained copy
    train = read_rows(job, reader, rows.own().train)
    validation = read_rows(job, reader, rows.validation)
    prior = head_of(classifier, trained.words)
    head, before = fitted_to_own_rows(job, prior, train, validation.own())
    set_head(classifier, head)
    validation_logits = head_logits(before, validation.spans)
    return replace(trained, words=head.words, validation_logits=validation_logits)


def adapted_spans(trained: TrainedEncoder, prompts: Sequence[Prompt]) -> list[RowSpans]:
    """The states and words of each prompt's spans, as the adapter's head reads them."""
    builder = cast(EncoderPromptBuilder, trained.job.builder)
    base = cast(Any, trained.model.get_base_model())
    classifier = base.classifier
    base.classifier = nn.Identity()  # then the model's logits are its states
    try:
        return row_spans(trained.model, builder, prompts, trained.job.reads)
    finally:
        base.classifier = classifier
