"""The head of an encoder's adapter, fitted again to the own rows where most others are generated.

Training is one fit to all rows, in which many generated rows outweigh a few own ones. So the head
is fitted once more, as one on the frozen encoder is (`train/head/fit.py`): to the own rows alone,
on the states that the adapter gives, and reading the logit of the trained head. The adapter's
low-rank weights stay as they are. The trained head has seen these rows, so it is too sure of them;
after an adapter of generated rows alone the result was no better. docs/lessons.md has figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from train.encoder.bases import head_of, set_head
from train.encoder.model import read, span_words
from train.encoder.trained import TrainedEncoder
from train.examples import Rows
from train.head.fit import fitted_to_own_rows, own_rows_suffice
from train.head.rows import RowSpans, head_logits, read_rows


def with_head_of_own_rows(trained: TrainedEncoder, rows: Rows) -> TrainedEncoder:
    """`trained` with its head, in place, fitted to the own rows; as it is where it has no head, and
    where too few rows are own ones or none is generated.

    The validation logits are those of the head before its last fit, which reads validation rows
    too. Raises GuardError for states that are not finite.
    """
    job = trained.job
    if job.recipe.kind != "encoder" or not own_rows_suffice(job, rows):
        return trained
    classifier = _classifier(trained)

    def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
        return adapted_spans(trained, prompts)

    train = read_rows(job, reader, rows.own().train)
    validation = read_rows(job, reader, rows.validation)
    prior = head_of(classifier, trained.words)
    head, before = fitted_to_own_rows(job, prior, train, validation.own())
    set_head(classifier, head)
    validation_logits = head_logits(before, validation.spans)
    return replace(trained, words=head.words, validation_logits=validation_logits)


def adapted_spans(trained: TrainedEncoder, prompts: Sequence[Prompt]) -> list[RowSpans]:
    """What the head of an adapter reads of each prompt: its spans' states, and their words."""
    job = trained.job
    builder = cast(EncoderPromptBuilder, job.builder)
    windows = [builder.windows(prompt.token_ids, job.reads) for prompt in prompts]

    def reading(ids: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, trained.model(input_ids=ids, attention_mask=mask).logits)

    with _states_for_logits(trained):
        states = read(trained.model, reading, builder, windows)
    rows: list[RowSpans] = []
    for prompt_windows, span_states in zip(windows, states, strict=True):
        words = span_words(builder, prompt_windows, job.reads)
        rows.append(RowSpans(span_states, words))
    return rows


def _classifier(trained: TrainedEncoder) -> nn.Linear:
    """The trained copy of the classifier, which PEFT keeps beside the base's."""
    base = cast(Any, trained.model.get_base_model())
    return cast(nn.Linear, base.classifier.modules_to_save["default"])


@contextmanager
def _states_for_logits(trained: TrainedEncoder) -> Iterator[None]:
    """Meanwhile the model gives what its classifier reads."""
    base = cast(Any, trained.model.get_base_model())
    classifier = base.classifier
    base.classifier = nn.Identity()
    try:
        yield
    finally:
        base.classifier = classifier
