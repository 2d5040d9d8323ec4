"""Prompts of unequal length as one tensor. Knows nothing of labels or models.

Padding stands on the left: every row then ends where its verdict is predicted, so the vocabulary is
scored at one position a row, and PEFT, which counts an aLoRA's activation from the end of the row,
finds it in the right place. With padding on the right both would be silently wrong. Position ids
start at 0 at each row's first real token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

# Padded tokens that go through the model at once: 2 GB of activations in training the tiny base.
BATCH_TOKENS = 8192
# The same without gradients, on a CPU: 1.2 to 1.6 times as fast as 8,192, which its caches cannot
# hold.
PASS_TOKENS = 2048
PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")
# For `logits_to_keep`. For 1 transformers takes a slice with the strides of all positions, and
# PyTorch then copies the output layer once a row: .7 s in a step of SmolLM2 (docs/lessons.md).
LAST_POSITION = torch.tensor([-1])


def left_padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """PROMPT_TENSORS by name, each int64 [rows, longest]."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tokens]
    input_ids = pad_sequence(tokens, batch_first=True, padding_side="left")
    attention_mask = pad_sequence(masks, batch_first=True, padding_side="left")
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
    }


def pass_tokens(device: torch.device) -> int:
    return PASS_TOKENS if device.type == "cpu" else BATCH_TOKENS


def by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of at most `max_tokens` padded tokens; a longer row is alone. Longest
    first, to fail early on memory.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
