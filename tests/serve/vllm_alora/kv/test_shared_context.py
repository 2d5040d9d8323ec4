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
    """Requests that have 10 tokens in common and compute 3 of their own, each with a last block of
    its own.
    """
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


def test_other_blocks_are_another_context() -> None:
    other = batch(4)
    other.blocks[1, 0] = 8
    assert shared_contexts(other, WORTH) == [SharedContext(CONTEXT, (0, 2, 3), None)]


def test_other_tokens_behind_the_last_whole_block_are_another_context() -> None:
    other = batch(4)
    other.token_ids[2, CONTEXT - 1] = 99
    assert shared_contexts(other, WORTH) == [SharedContext(CONTEXT, (0, 1, 3), None)]


def test_another_length_is_another_context() -> None:
    assert shared_contexts(batch(computed=np.array([CONTEXT, CONTEXT - 1, CONTEXT])), WORTH) == [
        SharedContext(CONTEXT, (0, 2), None)
    ]


def test_what_an_adapter_has_computed_is_nobody_else_s() -> None:
    base_tokens = np.array([CONTEXT, CONTEXT - 1, CONTEXT])
    assert shared_contexts(batch(base_tokens=base_tokens), WORTH) == [
        SharedContext(CONTEXT, (0, 2), None)
    ]


def test_a_request_that_computes_much_of_its_own_reads_alone() -> None:
    scheduled = np.array([3, MAX_QUERY + 1, 3])
    assert shared_contexts(batch(scheduled=scheduled), WORTH) == [
        SharedContext(CONTEXT, (0, 2), None)
    ]


@pytest.mark.parametrize("worth", [Worth(CONTEXT + 1, 0), Worth(0, 3 * 3 * CONTEXT + 1)])
def test_little_is_not_worth_it(worth: Worth) -> None:
    assert shared_contexts(batch(), worth) == []


def with_leader(**changes: Any) -> Batch:
    """The same after a request that computes all of the context in this step."""
    return batch(
        4,
        computed=np.array([0, CONTEXT, CONTEXT, CONTEXT]),
        scheduled=np.array([13, 3, 3, 3]),
        **changes,
    )


def test_a_context_that_the_step_computes_is_found_in_it() -> None:
    assert shared_contexts(with_leader(), WORTH) == [SharedContext(CONTEXT, (1, 2, 3), 0)]


def test_a_context_of_which_the_step_computes_a_part_is_not() -> None:
    part = with_leader()
    part.computed[0] = BLOCK
    assert shared_contexts(part, WORTH) == [SharedContext(CONTEXT, (1, 2, 3), None)]


def test_nor_is_one_that_an_adapter_computes() -> None:
    base_tokens = np.array([BLOCK, CONTEXT, CONTEXT, CONTEXT])
    shared = shared_contexts(with_leader(base_tokens=base_tokens), WORTH)
    assert shared == [SharedContext(CONTEXT, (1, 2, 3), None)]


def test_two_conversations_are_two_contexts() -> None:
    two = batch(6)
    two.blocks[3:, 0] = 9
    assert shared_contexts(two, WORTH) == [
        SharedContext(CONTEXT, (0, 1, 2), None),
        SharedContext(CONTEXT, (3, 4, 5), None),
    ]


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
