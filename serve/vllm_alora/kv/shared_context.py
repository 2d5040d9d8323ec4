"""Which requests of a step have their context in common: the tokens whose keys and values they read
and do not compute.

A hundred rules on one conversation attend to the same 5,000 tokens; an attention kernel that takes
requests one by one reads these a hundred times. Knows nothing of attention (`cascade.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]

MAX_QUERY = 64  # computed tokens of a reader: with more of them it is a product of its own


@dataclass(frozen=True)
class Batch:
    """A step's requests, in the order of its rows, and what they compute. `blocks` are ids,
    [requests, blocks of the longest], and `token_ids` [requests, tokens of the longest]; all others
    [requests]. `base_tokens`: how many tokens from the prompt's first on have the base's keys and
    values.
    """

    blocks: Ints
    token_ids: Ints
    computed: Ints
    scheduled: Ints
    base_tokens: Ints
    block_size: int

    @property
    def first_rows(self) -> Ints:
        """The row of each request's first token in the step."""
        return np.cumsum(self.scheduled) - self.scheduled


class Worth(NamedTuple):
    """The least context that is worth reading once: its tokens, and these times its readers."""

    tokens: int
    reads: int


class SharedContext(NamedTuple):
    """`tokens` that these requests of a batch have before what they compute. `computed_at`: the row
    of the first of them in the step, if it computes them all.
    """

    tokens: int
    requests: tuple[int, ...]
    computed_at: int | None


def shared_contexts(batch: Batch, worth: Worth) -> list[SharedContext]:
    """The contexts that requests have in common, where reading them once is worth it. Two are the
    same if they lie in the same blocks, and, behind the last whole block, have the same tokens,
    computed by the base: then their keys and values are the same too.
    """
    is_reader = (
        (batch.computed >= worth.tokens)
        & (batch.computed <= batch.base_tokens)
        & (batch.scheduled <= MAX_QUERY)
    )
    readers: dict[tuple[int, bytes, bytes], list[int]] = {}
    for request in np.flatnonzero(is_reader).tolist():
        readers.setdefault(_context(batch, request), []).append(request)
    contexts = []
    for (tokens, *_), requests in readers.items():
        reads = tokens * int(batch.scheduled[requests].sum())
        if len(requests) > 1 and reads >= worth.reads:
            contexts.append(
                SharedContext(tokens, tuple(requests), _computed_at(batch, requests[0]))
            )
    return contexts


def _context(batch: Batch, request: int) -> tuple[int, bytes, bytes]:
    """The key of a request's context: its length, its whole blocks, the tokens behind them."""
    tokens = int(batch.computed[request])
    whole = tokens // batch.block_size
    behind = batch.token_ids[request, whole * batch.block_size : tokens]
    return tokens, batch.blocks[request, :whole].tobytes(), behind.tobytes()


def _computed_at(batch: Batch, reader: int) -> int | None:
    """The first row of a request that computes all of the reader's context in this step."""
    tokens = int(batch.computed[reader])
    computes_all = (batch.computed == 0) & (
        np.minimum(batch.scheduled, batch.base_tokens) >= tokens
    )
    for request in np.flatnonzero(computes_all).tolist():
        whole = tokens // batch.block_size
        has_blocks = np.array_equal(batch.blocks[request, :whole], batch.blocks[reader, :whole])
        if has_blocks and np.array_equal(
            batch.token_ids[request, :tokens], batch.token_ids[reader, :tokens]
        ):
            return int(batch.first_rows[request])
    return None


def between(requests: Sequence[int], total: int) -> list[range]:
    """The runs of requests, out of `total`, that are not among `requests`."""
    runs = []
    start = 0
    for request in [*sorted(requests), total]:
        if start < request:
            runs.append(range(start, request))
        start = request + 1
    return runs
