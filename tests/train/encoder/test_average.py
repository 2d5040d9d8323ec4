"""Weights are given back after their mean; `test_trainer.py` holds the mean to its formula."""

from __future__ import annotations

import pytest
import torch

from train.encoder.average import AveragedWeights


def test_the_weights_are_their_mean_for_a_while() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    average = AveragedWeights(weights)
    for step in (1, 2):
        for weight in weights:
            weight.data.fill_(5.0 * step)
        average.update(step)
    with pytest.raises(KeyboardInterrupt), average.in_place():
        assert [weight.tolist() for weight in weights] == [[9.0, 9.0], [9.0]]  # (5 + 4 x 10) / 5
        raise KeyboardInterrupt
    assert [weight.tolist() for weight in weights] == [[10.0, 10.0], [10.0]]
    assert all(weight.requires_grad for weight in weights)
