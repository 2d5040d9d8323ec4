"""The products in C++: what is refused. What they compute: test_sgmv.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm_alora.low_rank.native import PIECE_TOKENS, NativeLayer, pieces_of

from tests.serve.vllm_alora.kv.contexts import threads_of

pytestmark = pytest.mark.slow


def test_many_tokens_of_one_adapter_are_shared_out() -> None:
    pieces = pieces_of({3: list(range(PIECE_TOKENS + 6)), 1: [90, 92]})
    assert pieces.table.tolist() == [
        [3, 0, PIECE_TOKENS],
        [3, PIECE_TOKENS, 6],
        [1, PIECE_TOKENS + 6, 2],
    ]
    assert pieces.tokens.tolist() == [*range(PIECE_TOKENS + 6), 90, 92]
    assert pieces.last == 92


def test_weights_and_rows_that_lie_otherwise_or_are_not_the_step_s_are_refused() -> None:
    """They would be read as if they did not, or written beyond their end."""
    a, b = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 16).mT
    ranks = np.full((1, 2), 4, np.int32)
    with pytest.raises(ValueError, match="B by columns"):
        NativeLayer([a], [b.contiguous()], [16], ranks)
    with pytest.raises(ValueError, match="other shapes"):
        NativeLayer([a], [b], [15], ranks)
    layer, pieces = NativeLayer([a], [b], [16], ranks), pieces_of({0: [2]})
    with pytest.raises(ValueError, match="rows must lie"):
        layer.add(torch.zeros(16, 3).mT, torch.zeros(3, 8), pieces)
    layer.add(torch.zeros(3, 16), torch.zeros(3, 8), pieces)
    for rows, width, inputs in ((2, 16, 8), (3, 15, 8), (3, 16, 9)):
        with pytest.raises(ValueError, match="not the rows of the step"):
            layer.add(torch.zeros(rows, width), torch.zeros(rows, inputs), pieces)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_share_the_work_and_bits_are_the_same(dtype: torch.dtype, threads: int) -> None:
    """Whoever computes a piece, and whether or not the next one's weights are fetched meanwhile:
    every sum is of one thread. Slices of unlike widths, adapters of unlike ranks, some of none.
    """
    torch.manual_seed(0)
    slots, widths = 30, [80, 16, 41]
    a = [torch.randn(slots, 1, 4, 73).to(dtype) for _ in widths]
    b = [torch.randn(slots, 1, 4, width).to(dtype).mT for width in widths]
    layer = NativeLayer(a, b, widths, np.random.default_rng(0).integers(0, 5, (3, slots), np.int32))
    pieces = pieces_of({slot: list(range(7 * slot, 7 * slot + 7)) for slot in range(slots)})
    x, start = torch.randn(7 * slots, 73).to(dtype), torch.randn(7 * slots, sum(widths)).to(dtype)
    sums = []
    for _ in threads_of(1, threads):
        sums.append(start.clone())
        layer.add(sums[-1], x, pieces)
    assert torch.equal(*sums) and not torch.equal(sums[0], start)
