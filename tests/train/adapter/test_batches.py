"""The order of the rows: like lengths side by side, and the same in a resumed run."""

from __future__ import annotations

import torch

from train.adapter.batches import LengthGrouped, StepBatches


def test_an_epoch_holds_every_row_once_with_neighbours_of_similar_length() -> None:
    lengths = [(index * 37) % 101 for index in range(96)]
    order = list(LengthGrouped(lengths, batch_rows=8, seed=0))
    assert sorted(order) == list(range(96))
    spread = [
        max(lengths[i] for i in order[at : at + 8]) - min(lengths[i] for i in order[at : at + 8])
        for at in range(0, 96, 8)
    ]
    assert sorted(spread)[len(spread) // 2] < 40  # of 100 in random order


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = LengthGrouped(list(range(64)), batch_rows=4, seed=seed)
        sampler.set_epoch(epoch)
        torch.rand(1)  # the global generator is elsewhere in a resumed run
        return list(sampler)

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


def test_the_batches_of_an_epoch_hold_every_row_once_and_a_resumed_run_s_are_the_same() -> None:
    lengths = list(range(10))
    batches = StepBatches(lengths, batch_rows=4, seed=1)
    of_steps = [batches.at(step) for step in range(6)]
    for epoch in (of_steps[:3], of_steps[3:]):
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(index for batch in epoch for index in batch) == list(range(10))
    assert of_steps[:3] != of_steps[3:]
    assert StepBatches(lengths, batch_rows=4, seed=1).at(4) == of_steps[4]
