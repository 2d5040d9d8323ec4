"""The head of an encoder's adapter, fitted again to the own rows where most rows are generated.

An adapter is trained on all rows at once, so many generated rows outweigh a few own ones.
Afterwards its head is fitted to the own rows alone, as a head on the frozen encoder is
(`train/head/fit.py`). The head reads the adapter's states and the logit of the trained head; the
low-rank weights stay. The trained head has seen the own rows and is too sure of them, but a head on
an adapter of generated rows alone was no better (docs/lessons.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from train.encoder.bases import head_of, set_head
from train.encoder.model import plain_logits, read, row_spans
from train.encoder.trained import TrainedEncoder
from train.examples import Rows
from train.head.fit import fitted_to_own_rows, own_rows_suffice
from train.head.rows import RowSpans, head_logits, read_rows


def with_head_of_own_rows(trained: TrainedEncoder, rows: Rows) -> TrainedEncoder:
    """Fit the head of `trained` to the own rows, in place. An adapter without a head, or of too few
    own rows, or of no generated ones, stays as it is.

    The last fit reads the validation rows too, so the validation logits are those of the head
    before it. Raises GuardError for states that are not finite.
    """
    job = trained.job
    if job.recipe.kind != "encoder" or not own_rows_suffice(job, rows):
        return trained

    def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
        return adapted_spans(trained, prompts)

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
    reads = trained.job.reads
    builder = cast(EncoderPromptBuilder, trained.job.builder)
    windows = [builder.windows(prompt.token_ids, reads) for prompt in prompts]
    base = cast(Any, trained.model.get_base_model())
    classifier = base.classifier
    base.classifier = nn.Identity()  # then the model's logits are its states
    try:
        states = read(trained.model, plain_logits, builder, windows)
    finally:
        base.classifier = classifier
    return row_spans(builder, windows, states, reads)
