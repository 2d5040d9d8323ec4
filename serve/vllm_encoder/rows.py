"""The sequences of a step as padded rows, for what has to see a sequence as a whole.

vLLM lays the tokens of all sequences flat, one after another, and may pad the tail of the step.
Here sequences of like length share a block, one padded row each, so no token ever meets one of
another request. What belongs to no sequence is in no row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

# Scores of a block and head at most, [rows, longest, positions]: 100 MB in float32 with 12 heads.
BLOCK_SCORES = 2**21


@dataclass(frozen=True)
class PaddedRows:
    """Sequences of like length. `tokens`: where each row's tokens lie in the step, [rows, longest],
    0 behind its end; `is_token` says where they are; `sequences`: their numbers in the step.
    """

    tokens: Tensor
    is_token: Tensor
    sequences: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """[tokens, width] -> [rows, longest, width], zeros behind a row's end."""
        # Not a multiplication: padding reads the step's first token, and NaN times zero is NaN.
        return flat[self.tokens].masked_fill_(~self.is_token.unsqueeze(-1), 0)

    def put(self, flat: Tensor, rows: Tensor) -> None:
        """Write [rows, longest, width] to where the tokens lie in `flat`, in place."""
        flat[self.tokens[self.is_token]] = rows[self.is_token]


def bounds(layer_name: str, tokens: int, max_tokens: int) -> list[int]:
    """Where the step's sequences begin, and where the last ends; what follows is padding. From the
    metadata of the attention layer of this name. A dry run of vLLM has none: there it is as many of
    the longest sequences as make up the tokens.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return [*range(0, tokens, max_tokens), tokens]
    if not isinstance(metadata, dict):  # of micro-batches: each has some of the tokens
        raise TypeError(f"attention's metadata is a {type(metadata).__name__}, not one a layer")
    layer_metadata: Any = metadata[layer_name]
    starts: list[int] = layer_metadata.query_start_loc.tolist()
    return starts


def padded_rows(starts: Sequence[int], positions: int, device: torch.device) -> list[PaddedRows]:
    """The sequences between `starts`, longest first, in blocks of at most BLOCK_SCORES. A row is at
    least half full. Each token has a score for each token of its row, and for each of `positions`.
    """
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    longest_first = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    blocks: list[list[int]] = []
    for sequence in longest_first:
        if not lengths[sequence]:
            continue
        if not blocks or not _fits(blocks[-1], lengths, sequence, positions):
            blocks.append([])
        blocks[-1].append(sequence)
    return [_rows(block, starts, lengths, device) for block in blocks]


def _fits(block: Sequence[int], lengths: Sequence[int], sequence: int, positions: int) -> bool:
    longest = lengths[block[0]]
    scores = (len(block) + 1) * longest * max(longest, positions)
    return scores <= BLOCK_SCORES and 2 * lengths[sequence] >= longest


def _rows(
    block: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
) -> PaddedRows:
    offsets = torch.arange(lengths[block[0]])
    first = torch.tensor([starts[sequence] for sequence in block]).unsqueeze(1)
    length = torch.tensor([lengths[sequence] for sequence in block]).unsqueeze(1)
    is_token = offsets < length
    tokens = torch.where(is_token, first + offsets, 0)
    return PaddedRows(tokens.to(device), is_token.to(device), tuple(block))
