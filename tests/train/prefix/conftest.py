"""Training of aLoRAs on toy bases, and what their weights differ by."""

from __future__ import annotations

import torch

from guard.errors import GuardError
from tests.train.conftest import data, weights, with_settings
from train.adapter.trained import TrainedAdapter
from train.examples import Rows
from train.job import Job
from train.prefix import trainer as shared_prefix


def adapter_weights(fitted: TrainedAdapter | GuardError) -> dict[str, torch.Tensor]:
    assert isinstance(fitted, TrainedAdapter)
    return weights(fitted.model)


def fitted(*jobs: Job) -> list[dict[str, torch.Tensor]]:
    return fitted_to([(job, data(job)) for job in jobs])


def fitted_to(work: list[tuple[Job, Rows]]) -> list[dict[str, torch.Tensor]]:
    return [adapter_weights(model) for model in shared_prefix.fit(work)]


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


def patient(job: Job, epochs: int) -> Job:
    return with_settings(job, early_stopping_patience=epochs)
