"""Which requests of a step read the same keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm_alora.kv.shared_context import (
    MAX_QUERY,
    Batch,
    SharedContext,
    Worth,
    between,
    shared_contexts,
)

BLOCK = 4
CONTEXT = 10  # tokens: two whole blocks and two tokens
WORTH = Worth(6, 2 * 3 * CONTEXT)


def batch(requests: int = 3, **changes: Any) -> Batch:
    """Requests with 10 tokens in common, 3 of their own, and a last block of their own."""
    blocks = np.tile(np.array([7, 5, 0, 0], np.int32), (requests, 1))
    blocks[:, 2] = 10 + np.arange(requests)
    token_ids = np.tile(np.arange(16, dtype=np.int32), (requests, 1))
    token_ids[:, CONTEXT:] += 100 * np.arange(requests)[:, None]
    fields = {
        "blocks": blocks,
        "token_ids": token_ids,
        "computed": np.full(requests, CONTEXT),
        "scheduled": np.full(requests, 3),
        "base_tokens": np.full(requests, CONTEXT),
        "block_size": BLOCK,
    }
    return Batch(**(fields | changes))


def test_requests_with_the_same_blocks_and_the_same_tokens_behind_them_share_a_context() -> None:
    assert shared_contexts(batch(), WORTH) == [SharedContext(CONTEXT, (0, 1, 2), None)]
    two = batch(6)
    two.blocks[3:, 0] = 9
    assert shared_contexts(two, WORTH) == [
        SharedContext(CONTEXT, (0, 1, 2), None),
        SharedContext(CONTEXT, (3, 4, 5), None),
    ]


@pytest.mark.parametrize(
    ("field", "place", "value"),
    [
        ("blocks", (1, 0), 8),
        ("token_ids", (1, CONTEXT - 1), 99),  # behind the last whole block
        ("computed", 1, CONTEXT - 1),
        ("base_tokens", 1, CONTEXT - 1),  # an adapter has computed some of it
        ("scheduled", 1, MAX_QUERY + 1),  # much of its own: it reads alone
    ],
)
def test_what_differs_is_another_context(field: str, place: Any, value: int) -> None:
    other = batch(4)
    getattr(other, field)[place] = value
    assert shared_contexts(other, WORTH) == [SharedContext(CONTEXT, (0, 2, 3), None)]


@pytest.mark.parametrize("worth", [Worth(CONTEXT + 1, 0), Worth(0, 3 * 3 * CONTEXT + 1)])
def test_little_is_not_worth_it(worth: Worth) -> None:
    assert shared_contexts(batch(), worth) == []


@pytest.mark.parametrize(
    ("computed", "base_tokens", "computed_at"),
    [(0, CONTEXT, 0), (BLOCK, CONTEXT, None), (0, BLOCK, None)],
)
def test_a_context_of_which_the_base_computes_all_in_the_step_is_found_in_it(
    computed: int, base_tokens: int, computed_at: int | None
) -> None:
    with_leader = batch(
        4,
        computed=np.array([computed, CONTEXT, CONTEXT, CONTEXT]),
        scheduled=np.array([13, 3, 3, 3]),
        base_tokens=np.array([base_tokens, CONTEXT, CONTEXT, CONTEXT]),
    )
    expected = SharedContext(CONTEXT, (1, 2, 3), computed_at)
    assert shared_contexts(with_leader, WORTH) == [expected]


@pytest.mark.parametrize(
    ("requests", "runs"),
    [
        ([], [range(0, 5)]),
        ([0, 1, 2, 3, 4], []),
        ([1, 2], [range(0, 1), range(3, 5)]),
        ([4, 0], [range(1, 4)]),
    ],
)
def test_the_requests_between_others_are_runs(requests: list[int], runs: list[range]) -> None:
    assert between(requests, 5) == runs
