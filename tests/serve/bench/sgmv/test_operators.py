"""The operators by themselves, against one token after another."""

from __future__ import annotations

import pytest
import torch

from serve.bench.sgmv.batches import SgmvBatch
from serve.bench.sgmv.layers import LayerWork, work_of
from serve.bench.sgmv.operators import operators
from serve.bench.sgmv.report import LOOP, OURS, VLLMS
from tests.serve.bench.sgmv.toy_batches import FEW, RANKS
from tests.serve.cards import recipe

pytestmark = pytest.mark.slow

# A slot whose tokens do not follow one another, as where conversations share adapters.
TWICE = SgmvBatch("twice", ((2, 3), (0, 3), (2, 4)), RANKS)


def by_token(batch: SgmvBatch, work: LayerWork) -> torch.Tensor:
    """The sums of a layer, each token's alone."""
    layer = work.layer
    rows: list[torch.Tensor] = []
    for token, slot in enumerate(batch.slot_of_token):
        parts: list[torch.Tensor] = []
        for a, b in zip(layer.a, layer.b, strict=True):
            parts.append(b[slot, 0] @ (a[slot, 0] @ work.x[token]))
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("batch", [FEW, TWICE], ids=lambda batch: batch.name)
def test_every_operator_adds_each_token_s_own_product(batch: SgmvBatch) -> None:
    of_batch = operators(batch)
    assert list(of_batch) == [OURS, LOOP, VLLMS]
    work = work_of(recipe(), batch, rank=16)[:4]  # one decoder layer
    for operator in of_batch.values():
        for piece in work:
            piece.y.zero_()
            operator(piece.y, piece.x, piece.layer)
            expected = by_token(batch, piece)
            assert (piece.y - expected).abs().max() < 1e-4 * expected.abs().max()
