"""The layers of the tiny base, as vLLM packs them."""

from __future__ import annotations

import pytest
import torch

from serve.bench.sgmv.layers import decoder_layers, layers_of, work_of
from tests.serve.bench.sgmv.toy_batches import FEW, RANKS
from tests.serve.cards import recipe

pytestmark = pytest.mark.slow


def test_an_adapter_is_zero_above_its_rank_and_kept_by_columns_and_by_rows() -> None:
    layers = layers_of(recipe(), 16, RANKS, seed=0)
    assert [len(layer.slices) for layer in layers] == [3, 1, 2, 1]  # QKV, O, gate and up, down
    for layer in layers:
        for a, b, b_by_rows in zip(layer.a, layer.b, layer.b_by_rows, strict=True):
            assert a[2, 0, :4].any() and not a[2, 0, 4:].any()
            assert b[2, 0, :, :4].any() and not b[2, 0, :, 4:].any()
            assert a[1, 0, 4:].any() and b[1, 0, :, 4:].any()
            assert torch.equal(b, b_by_rows) and b_by_rows.is_contiguous()
            assert not b.is_contiguous()


def test_every_layer_of_the_base_gets_the_batch_s_tokens() -> None:
    work = work_of(recipe(), FEW, rank=16)
    assert len(work) == 4 * decoder_layers(recipe())
    for piece in work:
        assert piece.x.shape == (FEW.tokens, piece.layer.inputs)
        assert piece.y.shape == (FEW.tokens, sum(piece.layer.slices))
