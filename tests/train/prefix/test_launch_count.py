"""What is counted as a launch, and what is not."""

from __future__ import annotations

import torch

from tests.train.prefix.launch_count import LaunchCount


def test_operators_count_and_views_and_allocations_do_not() -> None:
    matrix = torch.ones(4, 6)
    with LaunchCount() as count:
        torch.empty(3)
        flat = matrix.t()[1:].reshape(-1).view(2, 10)
        flat.add_(1).detach()
    assert count.launches == {"clone": 1, "add_": 1}  # reshape has to copy


def test_the_backward_pass_counts_too() -> None:
    weight = torch.ones(3, requires_grad=True)
    with LaunchCount() as count:
        (weight * 2).sum().backward()
    assert count.launches == {"mul": 2, "sum": 1, "ones_like": 1}


def test_an_operator_on_a_list_counts_once_for_as_many_tensors_as_a_launch_takes() -> None:
    tensors = [torch.ones(2) for _ in range(200)]
    with LaunchCount() as count:
        torch.cat(tensors[:128])
        torch.stack(tensors)
        torch._foreach_add_(tensors[:61], 1)
    assert count.launches == {"cat": 1, "stack": 2, "_foreach_add_": 3}
