"""The mean of a training's weights: against its formula, and the weights are given back."""

from __future__ import annotations

import pytest
import torch

from train.encoder.average import AveragedWeights


def test_a_step_weighs_about_as_its_third_power() -> None:
    """Unrolled, the update gives the step t a weight proportional to t (t + 1) (t + 2)."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randn(20, 3, 2, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.full((3, 2), 9.0, dtype=torch.float64))
    average = AveragedWeights([weight])
    for step, value in enumerate(history, 1):
        weight.data.copy_(value)
        average.update(step)
    steps = torch.arange(1.0, 21.0, dtype=torch.float64)
    shares = steps * (steps + 1) * (steps + 2)
    expected = (shares[:, None, None] * history).sum(0) / shares.sum()
    torch.testing.assert_close(average.means[0], expected)
    torch.testing.assert_close(weight.data, history[-1])  # training goes on from the last ones


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
