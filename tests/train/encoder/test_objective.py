"""A step's loss and gradients, however its rows are cut into parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn

from tests.train.conftest import MakeEncoderJob, data
from train.encoder.model import token_logits
from train.encoder.trainer import Training

pytestmark = pytest.mark.slow


def test_parts_add_up_to_all(make_encoder_job: MakeEncoderJob, monkeypatch: MonkeyPatch) -> None:
    job = make_encoder_job(max_steps=1)
    training = Training(job, data(job))
    model = training.run().model
    objective = training.objective
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts: list[int] = []

    def counted(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        parts.append(len(ids))
        return token_logits(model, ids, mask)

    objective = replace(objective, base=replace(objective.base, token_logits=counted))
    losses: list[float] = []
    gradients: list[list[torch.Tensor]] = []
    for max_tokens in (8192, 64, 1):
        monkeypatch.setattr("train.encoder.objective.BATCH_TOKENS", max_tokens)
        model.zero_grad()
        losses.append(objective.backward(model, range(12)))
        gradients.append([weight.grad.clone() for weight in weights if weight.grad is not None])
    assert len(gradients[0]) == len(weights)
    for loss, of_parts in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=1e-6)
        torch.testing.assert_close(of_parts, gradients[0], atol=1e-6, rtol=1e-4)
    assert parts[0] == 12 and parts[-12:] == [1] * 12 and len(parts) > 1 + 2 + 12
