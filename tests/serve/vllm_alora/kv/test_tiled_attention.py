"""PyTorch's attention in two parts is attention."""

from __future__ import annotations

import pytest
import torch
from vllm_alora.kv.tiled_attention import TiledAttention, own_rows

from tests.serve.vllm_alora.kv.contexts import (
    HEADS,
    KEY_HEADS,
    STEPS,
    Step,
    assert_attention,
    batch_of,
)

pytestmark = pytest.mark.slow


def attention_of(first_rows: list[int], lengths: list[int], dtype: torch.dtype) -> TiledAttention:
    requests = tuple(range(len(lengths)))
    return TiledAttention.of(batch_of(first_rows, lengths), requests, HEADS // KEY_HEADS, dtype)


@pytest.mark.parametrize(("first_rows", "lengths"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_attention_in_two_parts_is_attention(
    first_rows: list[int], lengths: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    attention = attention_of(first_rows, lengths, dtype)
    step = Step.random(130, 70, dtype)
    assert_attention(attention, step, first_rows, lengths, tolerance)


@pytest.mark.parametrize("spoilt", ["key", "value"])
def test_one_request_s_nan_reaches_no_other(spoilt: str) -> None:
    attention = attention_of([number * 3 for number in range(8)], [3] * 8, torch.float32)
    step = Step.random(24, 70, torch.float32)
    whole = step.attend(attention)
    getattr(step, spoilt)[9:12] = torch.nan
    attended = step.attend(attention)
    others = [*range(9), *range(12, 24)]
    torch.testing.assert_close(attended[others], whole[others], atol=2e-6, rtol=2e-6)
    assert attended[9:12].isnan().all()


def test_a_row_of_a_tile_attends_to_its_own_request_up_to_itself() -> None:
    mask = own_rows(2, 2, 1, torch.float32)
    assert mask.isfinite().int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
    assert torch.equal(own_rows(2, 2, 3, torch.float32), mask.repeat(3, 1))


def test_a_short_request_is_filled_up_with_its_last_row() -> None:
    """The example of the class."""
    attention = attention_of([10, 5], [1, 3], torch.float32)
    assert attention.alone.tolist() == [[10, 10, 10], [5, 6, 7]]
    # A tile of 48 rows is 16 requests: the last one again, and nobody asks for what it gives.
    assert attention.tiles.tolist() == [[10, 10, 10] + [5, 6, 7] * 15]
    assert isinstance(attention.rows, torch.Tensor) and isinstance(attention.unpadded, torch.Tensor)
    assert attention.rows.tolist() == [10, 5, 6, 7]
    assert attention.unpadded.tolist() == [0, 3, 4, 5]
