"""The keys and values of prefixes under a frozen base, computed once. Knows nothing of adapters, rules or labels.

An aLoRA acts from the invocation on, so what stands before it is a constant of the base: it is computed without gradient,
kept within a budget, and shared by every epoch, seed and rule that reads the same conversation. Three tiers: the device's memory,
the host's, and files that are mapped into memory. What fits into none is computed again whenever it is asked for.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from guard.errors import GuardError
from train.batch import BATCH_TOKENS, by_length

Prefix = tuple[int, ...]
Read = Callable[[], Tensor]
Tier = Callable[[dict[Prefix, Tensor]], dict[Prefix, Read]]


@dataclass(frozen=True)
class Budget:
    """Bytes of keys and values in each tier, the fastest first. On a CPU the device's memory is the host's: leave it at 0."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All tiers together."""
        return self.device + self.host + self.disk


class PrefixCache:
    """Keys and values by prefix, `[layers, 2, kv_heads, tokens, head_dim]` each, as many as `budget` allows; files go to `folder`.

    Nothing is evicted: an epoch reads every prefix once, and of anything read in a circle the best part to keep is a fixed one.
    """

    def __init__(self, model: PreTrainedModel, budget: Budget, folder: Path | None = None) -> None:
        self._model, self._folder = model, folder
        self._room: dict[Tier, int] = {self._on_device: budget.device, self._on_host: budget.host, self._on_disk: budget.disk}
        self._kept: dict[Prefix, Read] = {}

    @property
    def bytes_per_token(self) -> int:
        """What one token of a prefix takes."""
        return self._computed([(0,)])[(0,)].nbytes

    def fill(self, prefixes: Iterable[Prefix]) -> None:
        """Compute and keep the longest of `prefixes` that fit, until one does not; from then on the cache is full.

        A resumed run finds the same states up to rounding: which are kept, and were thus computed in company, depends on the room.
        """
        if not any(self._room.values()):
            return
        wanted = sorted(set(prefixes) - self._kept.keys(), key=lambda prefix: (-len(prefix), prefix))
        with tqdm(total=sum(map(len, wanted)), desc="prefixes", unit="token", unit_scale=True, leave=False) as bar:
            for rows in by_length([len(prefix) for prefix in wanted], BATCH_TOKENS):
                kept = self._keep(self._computed([wanted[row] for row in rows]))
                bar.update(kept)
                if kept < sum(len(wanted[row]) for row in rows):
                    return

    def gather(self, prefixes: Sequence[Prefix]) -> tuple[DynamicCache, Tensor]:
        """Keys and values of `prefixes` as one cache padded on the right, and which positions are real, bool `[rows, longest]`.

        Raises GuardError if the model's cache is not plain keys and values of every position.
        """
        # What was not kept is computed alone: the same bits in whatever company.
        found = {prefix: self._kept[prefix]() if prefix in self._kept else self._computed([prefix])[prefix] for prefix in set(prefixes)}
        longest = max(map(len, prefixes))
        first = found[prefixes[0]]
        layers, two, heads, _, width = first.shape
        padded = torch.zeros((layers, two, len(prefixes), heads, longest, width), dtype=first.dtype, device=self._model.device)
        for row, prefix in enumerate(prefixes):
            padded[:, :, row, :, : len(prefix)].copy_(found[prefix], non_blocking=True)
        real = torch.arange(longest) < torch.tensor([len(prefix) for prefix in prefixes])[:, None]
        return DynamicCache([(keys, values) for keys, values in padded]), real.to(self._model.device)

    def _keep(self, states: dict[Prefix, Tensor]) -> int:
        """Put each into the first tier with room until there is none; how many tokens were kept."""
        placed: dict[Tier, dict[Prefix, Tensor]] = {tier: {} for tier in self._room}
        for prefix, each in states.items():
            tier = next((tier for tier, room in self._room.items() if each.nbytes <= room), None)
            if tier is None:
                self._room = dict.fromkeys(self._room, 0)
                break
            self._room[tier] -= each.nbytes
            placed[tier][prefix] = each
        for tier, part in placed.items():
            self._kept |= tier(part) if part else {}
        return sum(len(prefix) for part in placed.values() for prefix in part)

    @torch.no_grad()
    def _computed(self, prefixes: Sequence[Prefix]) -> dict[Prefix, Tensor]:
        """In one pass, padded on the right: what stands before never attends to it."""
        longest = max(map(len, prefixes))
        ids = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes], device=self._model.device)
        cache = self._model.base_model(input_ids=ids, use_cache=True).past_key_values
        layers = [layer for layer in cache.layers if type(layer) is DynamicLayer] if isinstance(cache, DynamicCache) else []
        if not layers or len(layers) < len(cache.layers):
            remedy = "Train this base with LoRA, or use one with full attention in every layer"
            raise GuardError("this base does not keep the keys and values of every position", got=type(cache).__name__, remedy=remedy)
        whole = torch.stack([torch.stack((cast(Tensor, layer.keys), cast(Tensor, layer.values))) for layer in layers])
        return {prefix: whole[:, :, row, :, : len(prefix)].clone() for row, prefix in enumerate(prefixes)}

    def _on_device(self, states: dict[Prefix, Tensor]) -> dict[Prefix, Read]:
        return {prefix: functools.partial(Tensor.detach, each) for prefix, each in states.items()}

    def _on_host(self, states: dict[Prefix, Tensor]) -> dict[Prefix, Read]:
        pinned = self._model.device.type == "cuda"  # then a copy to the device does not wait
        return self._on_device({prefix: each.cpu().pin_memory() if pinned else each.cpu() for prefix, each in states.items()})

    def _on_disk(self, states: dict[Prefix, Tensor]) -> dict[Prefix, Read]:
        """In a file that is mapped into memory and has no name any more: its room is free when this process ends, however it ends."""
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".safetensors") as file:
            save_file({str(row): each.cpu() for row, each in enumerate(states.values())}, file.name)
            mapped = safe_open(file.name, "pt")
        return {prefix: functools.partial(mapped.get_tensor, str(row)) for row, prefix in enumerate(states)}
