"""Operators that are compared before they are timed."""

from __future__ import annotations

import pytest
import torch

from guard.errors import GuardError
from serve.bench.sgmv.layers import Layer, work_of
from serve.bench.sgmv.measure import check
from serve.bench.sgmv.operators import operators
from serve.bench.sgmv.report import LOOP, OURS
from tests.serve.bench.sgmv.toy_batches import FEW
from tests.serve.cards import recipe

pytestmark = pytest.mark.slow


def test_operators_that_disagree_stop_the_benchmark() -> None:
    of_batch = operators(FEW)
    work = work_of(recipe(), FEW, rank=16)
    check(FEW, of_batch, work, 1e-4)
    ours = of_batch[OURS]

    def mixed_up(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        ours(y, x.flip(0), layer)

    with pytest.raises(GuardError, match="two operators disagree"):
        check(FEW, of_batch | {LOOP: mixed_up}, work, 1e-4)
