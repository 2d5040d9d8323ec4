"""The keys and values of prefixes under a frozen base, computed once. Knows nothing of adapters, rules or labels.

An aLoRA acts from the invocation on, so what stands before it is a constant of the base: it is computed without gradient,
kept on the host within a budget, and shared by every epoch, seed and rule that reads the same conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from guard.errors import GuardError
from train.batch import BATCH_TOKENS, by_length

Prefix = tuple[int, ...]


class PrefixCache:
    """Keys and values by prefix, `[layers, 2, kv_heads, tokens, head_dim]` each, at most `budget_bytes` of them in host memory.

    What does not fit is computed again whenever it is asked for. Nothing is evicted: an epoch reads every prefix once, and of
    anything read in a circle the best part to keep is a fixed one.
    """

    def __init__(self, model: PreTrainedModel, budget_bytes: int) -> None:
        self._model, self._room = model, budget_bytes
        self._kept: dict[Prefix, torch.Tensor] = {}

    @property
    def bytes_per_token(self) -> int:
        """What one token of a prefix takes."""
        return self._computed([(0,)])[(0,)].nbytes

    def fill(self, prefixes: Iterable[Prefix]) -> None:
        """Compute and keep the longest of `prefixes` that fit, in an order that only they decide: a resumed run finds the same bits."""
        wanted = sorted(set(prefixes) - self._kept.keys(), key=lambda prefix: (-len(prefix), prefix))
        with tqdm(total=sum(map(len, wanted)), desc="prefixes", unit="token", unit_scale=True, leave=False) as bar:
            for rows in by_length([len(prefix) for prefix in wanted], BATCH_TOKENS):
                for prefix, states in self._computed([wanted[row] for row in rows]).items():
                    if states.nbytes > self._room:
                        return
                    self._room -= states.nbytes
                    self._kept[prefix] = states
                    bar.update(len(prefix))

    def gather(self, prefixes: Sequence[Prefix]) -> tuple[DynamicCache, torch.Tensor]:
        """Keys and values of `prefixes` as one cache padded on the right, and which positions are real, bool `[rows, longest]`.

        Raises GuardError if the model's cache is not plain keys and values of every position.
        """
        # What was not kept is computed alone: the same bits in whatever company.
        found = {prefix: self._kept[prefix] if prefix in self._kept else self._computed([prefix])[prefix] for prefix in set(prefixes)}
        longest = max(map(len, prefixes))
        first = found[prefixes[0]]
        layers, two, heads, _, width = first.shape
        padded = torch.zeros((layers, two, len(prefixes), heads, longest, width), dtype=first.dtype)
        for row, prefix in enumerate(prefixes):
            padded[:, :, row, :, : len(prefix)] = found[prefix]
        padded = padded.to(self._model.device, non_blocking=True)
        real = torch.arange(longest) < torch.tensor([len(prefix) for prefix in prefixes])[:, None]
        return DynamicCache([(keys, values) for keys, values in padded]), real.to(self._model.device)

    @torch.no_grad()
    def _computed(self, prefixes: Sequence[Prefix]) -> dict[Prefix, torch.Tensor]:
        """In one pass, padded on the right: what stands before never attends to it."""
        longest = max(map(len, prefixes))
        ids = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes], device=self._model.device)
        cache = self._model.base_model(input_ids=ids, use_cache=True).past_key_values
        layers = [layer for layer in cache.layers if type(layer) is DynamicLayer] if isinstance(cache, DynamicCache) else []
        if not layers or len(layers) < len(cache.layers):
            remedy = "Train this base with LoRA, or use one with full attention in every layer"
            raise GuardError("this base does not keep the keys and values of every position", got=type(cache).__name__, remedy=remedy)
        whole = torch.stack([torch.stack((cast(torch.Tensor, layer.keys), cast(torch.Tensor, layer.values))) for layer in layers]).cpu()
        return {prefix: whole[:, :, row, :, : len(prefix)].clone() for row, prefix in enumerate(prefixes)}
