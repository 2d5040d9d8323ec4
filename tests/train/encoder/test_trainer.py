"""An adapter with its head: the same seed gives the same bytes, the head begins as the regression,
the best evaluation's weights are kept, and a killed run begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from _pytest.capture import CaptureResult
from pytest import CaptureFixture, MonkeyPatch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from guard.weights.head import WordWeights
from tests.train.conftest import (
    MakeEncoderJob,
    calls_of,
    data,
    with_lora,
    with_recipe,
    with_settings,
)
from train.adapter.steps import EarlyStopping
from train.calibration.validation import calibrated_loss, validation_loss
from train.encoder.bases import training_start
from train.encoder.model import reader_of, token_logits
from train.encoder.trained import TrainedEncoder
from train.encoder.trainer import Training, fit, train_adapter_alone
from train.examples import Rows
from train.head.fit import FOLDS, TrainedHead, fitted
from train.job import Job

pytestmark = pytest.mark.slow


def trained(job: Job, rows: Rows | None = None) -> TrainedEncoder:
    (adapter,) = fit([(job, rows or data(job))])
    assert isinstance(adapter, TrainedEncoder), adapter
    return adapter


def validation_logits(adapter: TrainedEncoder, rows: Rows) -> list[float]:
    return adapter.logits([row.prompt for row in rows.validation])


def evaluated(written: CaptureResult[str]) -> list[str]:
    lines = [line for line in (written.out + written.err).splitlines() if "validation loss" in line]
    return [line.split(": ")[1].split(",")[0] for line in lines]


def test_a_row_is_trained_on_what_its_rule_judges(make_encoder_job: MakeEncoderJob) -> None:
    job = make_encoder_job(judged="assistant", max_steps=5)
    training = Training(job, data(job))
    adapter, objective = training.run(), training.objective
    builder = cast(EncoderPromptBuilder, job.builder)
    batch: list[int] = []
    logits: list[float] = []
    for index, row in enumerate(objective.rows[:32]):
        if len(builder.windows(row.prompt.token_ids, job.reads)) == 1:
            words, offset = objective.held_out[index]
            batch.append(index)
            logits.append(replace(adapter, words=words).logits([row.prompt])[0] + offset)
    rows = [objective.rows[index] for index in batch]
    assert len(batch) > 8 and logits != adapter.logits([row.prompt for row in rows])
    labels = torch.tensor([float(row.label) for row in rows])
    expected = binary_cross_entropy_with_logits(torch.tensor(logits), labels)
    assert objective.backward(adapter.model, batch) == pytest.approx(expected.item(), abs=1e-5)


def test_words_of_a_training_row_are_of_other_groups(make_encoder_job: MakeEncoderJob) -> None:
    """They would know it by heart, and nothing would be left for the adapter to learn. Of a pair
    that differs in one turn they would know the other's label.
    """
    job = make_encoder_job()
    rows = data(job)
    pairs = [replace(row, group=f"pair {index // 2}") for index, row in enumerate(rows.train)]
    start = training_start(job, replace(rows, train=tuple(pairs)))
    other = job.builder.build([Message("user", "zebra quartz zebra quartz")], "")
    pairs[4] = replace(pairs[4], prompt=other)
    of_changed = training_start(job, replace(rows, train=tuple(pairs)))
    for index in (4, 5):  # a pair
        assert same(start.held_out[index].words, of_changed.held_out[index].words)
    assert not same(start.words, of_changed.words)
    assert len({id(words) for words, _ in start.held_out}) == FOLDS
    assert not any(same(words, start.words) for words, _ in start.held_out)


def same(words: WordWeights, others: WordWeights) -> bool:
    return np.array_equal(words.weights, others.weights)


def test_few_groups_make_few_folds(make_encoder_job: MakeEncoderJob) -> None:
    """Where all rows share a context nothing is known of others."""
    job = make_encoder_job()
    rows = data(job)
    for groups, folds in ((1, 0), (2, 2), (3, 3)):
        few = [replace(row, group=f"{index // 2 % groups}") for index, row in enumerate(rows.train)]
        start = training_start(job, replace(rows, train=tuple(few)))
        assert len({id(words) for words, _ in start.held_out if words}) == folds


def first_head(job: Job, rows: Rows) -> TrainedHead:
    """What training begins with."""
    job.open_scratch()
    return fitted(job, rows, reader_of(job))


@pytest.mark.parametrize(("learning_rate", "best"), [(10.0, 0), (1e-2, 20)])
def test_the_best_weights_are_kept_with_their_logits(
    make_encoder_job: MakeEncoderJob, monkeypatch: MonkeyPatch, learning_rate: float, best: int
) -> None:
    """Those of the mean of all steps. The logits before the first step are the head's: no
    validation row is read for them. With a learning rate that destroys, the head is kept.
    """
    job = make_encoder_job(learning_rate=learning_rate, max_steps=20)
    rows = data(job)
    with monkeypatch.context() as watched:
        evaluations = calls_of(watched, TrainedEncoder, "logits")
        adapter = trained(job, rows)
    read = [len(prompts) for _, prompts in evaluations]
    assert read == [len(rows.validation)] * 2  # after steps 10 and 20
    logits = validation_logits(adapter, rows)
    np.testing.assert_allclose(adapter.validation_logits, logits, atol=1e-4)
    before = first_head(make_encoder_job("head"), rows).validation_logits
    assert np.allclose(logits, before, atol=1e-4) == (best == 0)
    if best:
        labels = [row.label for row in rows.validation]
        assert calibrated_loss(logits, labels) < calibrated_loss(before, labels)


def test_on_a_base_in_bfloat16_small_steps_change_the_head(
    make_encoder_job: MakeEncoderJob, monkeypatch: MonkeyPatch
) -> None:
    """Each is a thousandth of what bfloat16 tells apart in most of its weights."""
    monkeypatch.setattr(EarlyStopping, "restore", lambda self, weights: None)  # to the last step's
    job = with_recipe(make_encoder_job(learning_rate=1e-7), dtype="bfloat16")
    rows = data(job)
    start = first_head(replace(job, method="head"), rows).head.weight
    model = trained(job, rows).model
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trainable} == {torch.float32}
    assert next(model.parameters()).dtype == torch.bfloat16
    (classifier,) = (weight for weight in trainable if weight.shape == (2, len(start)))
    np.testing.assert_allclose(classifier.detach()[1], start / 2, atol=1e-4)
    assert (classifier.detach()[1].numpy() != start / 2).mean() > 0.9


def test_a_killed_run_begins_anew(make_encoder_job: MakeEncoderJob) -> None:
    """A better loss at a step of that run, with weights of that run."""
    job = make_encoder_job(max_steps=10)
    rows = data(job)
    undisturbed = validation_logits(trained(make_encoder_job(max_steps=10, runs="others")), rows)
    job.open_scratch()
    left = EarlyStopping(job.scratch, 3)
    left.record(5, 1e-9, [torch.zeros(1)])
    np.testing.assert_array_equal(validation_logits(trained(job), rows), undisturbed)


def test_better_ranking_stays(make_encoder_job: MakeEncoderJob, monkeypatch: MonkeyPatch) -> None:
    """What calibration mends does not count."""
    logits_of = TrainedEncoder.logits

    def off(trained: TrainedEncoder, prompts: Sequence[Prompt]) -> list[float]:
        return [logit / 20 - 1 for logit in logits_of(trained, prompts)]

    monkeypatch.setattr(TrainedEncoder, "logits", off)
    job = make_encoder_job(learning_rate=1e-2, max_steps=20)
    rows = data(job)
    shifted = trained(job, rows).validation_logits
    before = first_head(make_encoder_job("head"), rows).validation_logits
    labels = [row.label for row in rows.validation]
    assert validation_loss(shifted, labels) > validation_loss(before, labels)


@pytest.mark.parametrize(
    ("trainer", "patience", "min_steps", "steps"),
    [
        ({"max_steps": 6, "eval_steps": 0.4}, None, None, [0, 3, 6]),  # every share of the steps
        # Training stops early after the least steps alone, and few rows are trained as long.
        ({"num_train_epochs": 25, "eval_steps": 2}, 1, 5, [0, 2, 4, 6]),
        ({"num_train_epochs": 1, "eval_steps": 6}, None, 12, [0, 6, 12]),
    ],
)
def test_weights_are_evaluated_and_training_ends_when_the_recipe_says(
    make_encoder_job: MakeEncoderJob,
    capsys: CaptureFixture[str],
    trainer: dict[str, float],
    patience: int | None,
    min_steps: int | None,
    steps: list[int],
) -> None:
    job = make_encoder_job(**{"learning_rate": 10.0, "max_steps": -1} | trainer)
    trained(with_settings(job, early_stopping_patience=patience, min_steps=min_steps))
    told = [line.split(" of ")[0] for line in evaluated(capsys.readouterr())]
    assert told == [f"step {step}" for step in steps]


@pytest.mark.parametrize(("dropout", "repeats"), [(0.0, True), (0.5, False)])
def test_one_dropout_is_on(make_encoder_job: MakeEncoderJob, dropout: float, repeats: bool) -> None:
    job = with_lora(make_encoder_job(max_steps=1), init_lora_weights=False, lora_dropout=dropout)
    adapter = trained(job).model
    dropouts = [layer.p for layer in adapter.base_model.modules() if type(layer) is nn.Dropout]
    assert max(dropouts) > 0  # the base has some
    adapter.train()
    train_adapter_alone(adapter)
    ids = torch.arange(100, 120)[None]
    first, second = (token_logits(adapter, ids, torch.ones_like(ids)) for _ in range(2))
    assert torch.equal(first, second) == repeats


def test_long_rows_are_trained_and_divergence_is_an_error(make_encoder_job: MakeEncoderJob) -> None:
    """Rows of several windows."""
    job = make_encoder_job(max_steps=5)
    rows = data(job)
    long = job.builder.build([Message("user", "we talk about music " * 6)] * 5, "")
    lengthened = tuple(replace(row, prompt=long) for row in rows.train[:3])
    trained(job, replace(rows, train=(*rows.train, *lengthened)))
    job = make_encoder_job(learning_rate=1e30, max_grad_norm=0.0)
    (error,) = fit([(job, rows)])
    assert isinstance(error, GuardError) and "NaN or infinite" in str(error)


def test_parts_add_up_to_all(make_encoder_job: MakeEncoderJob, monkeypatch: MonkeyPatch) -> None:
    job = make_encoder_job(max_steps=1)
    training = Training(job, data(job))
    model = training.run().model
    objective = training.objective
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    losses: list[float] = []
    gradients: list[list[torch.Tensor]] = []
    for max_tokens in (8192, 64, 1):
        monkeypatch.setattr("train.encoder.trainer.BATCH_TOKENS", max_tokens)
        model.zero_grad()
        losses.append(objective.backward(model, range(12)))
        gradients.append([weight.grad.clone() for weight in weights if weight.grad is not None])
    assert len(gradients[0]) == len(weights)
    for loss, of_parts in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=1e-6)
        torch.testing.assert_close(of_parts, gradients[0], atol=1e-6, rtol=1e-4)
