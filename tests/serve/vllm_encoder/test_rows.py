"""Padded rows hold each token of each sequence once, and none of the tail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pytest import MonkeyPatch

pytestmark = pytest.mark.slow  # vLLM is imported

CPU = torch.device("cpu")


def test_every_token_of_a_sequence_lies_in_one_row_and_the_tail_in_none() -> None:
    from vllm_encoder.rows import padded_rows

    starts = [0, 3, 3, 20, 25]  # the second sequence is empty; what lies behind 25 is padding
    flat = torch.arange(1.0, 31.0).unsqueeze(1)
    written = torch.zeros_like(flat)
    sequences: list[int] = []
    for rows in padded_rows(starts, 8, CPU):
        sequences += rows.sequences
        row_of_sequence = zip(rows.of(flat), rows.is_token, rows.sequences, strict=True)
        for values, is_token, sequence in row_of_sequence:
            own = flat[starts[sequence] : starts[sequence + 1]]
            assert torch.equal(values[is_token], own)
            assert not values[~is_token].any()
        rows.put(written, rows.of(flat))
    assert sorted(sequences) == [0, 2, 3]
    assert torch.equal(written[:25], flat[:25])
    assert not written[25:].any()


def test_blocks_hold_rows_of_like_length_and_few_enough_scores(monkeypatch: MonkeyPatch) -> None:
    from vllm_encoder import rows

    monkeypatch.setattr(rows, "BLOCK_SCORES", 2 * 10 * 10)
    blocks = rows.padded_rows([0, 10, 14, 24, 34, 35], 8, CPU)
    assert [block.sequences for block in blocks] == [(0, 2), (3,), (1,), (4,)]


def test_only_a_dry_run_has_no_metadata() -> None:
    """Metadata that are not understood would put several sequences into one row."""
    from vllm.forward_context import override_forward_context
    from vllm_encoder.rows import bounds

    of_layer = SimpleNamespace(query_start_loc=torch.tensor([0, 3, 9]))
    for metadata, expected in ((None, [0, 8, 10]), ({"attention": of_layer}, [0, 3, 9])):
        with override_forward_context(SimpleNamespace(attn_metadata=metadata)):  # type: ignore[arg-type]
            assert bounds("attention", 10, 8) == expected
    micro_batches = SimpleNamespace(attn_metadata=[{"attention": of_layer}])
    with override_forward_context(micro_batches), pytest.raises(TypeError, match="is a list"):  # type: ignore[arg-type]
        bounds("attention", 10, 8)
