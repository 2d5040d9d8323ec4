"""The keys and values of prefixes under a frozen base, computed once, and the memory for them.

An aLoRA acts from the invocation on, so what stands before it is a constant of the base: it is
computed without gradient, kept within a budget, and shared by every epoch, seed and rule that reads
the same conversation. Two tiers: the device's memory and the host's. What fits into neither is
computed again whenever it is read. Knows nothing of adapters, rules or labels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import psutil
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from guard.errors import GuardError
from train.base import by_onednn
from train.batch import PASS_TOKENS, by_length
from train.job import Job

Prefix = tuple[int, ...]
Tier = Literal["device", "host"]
TIERS: tuple[Tier, ...] = ("device", "host")  # the fastest first


class PrefixCache:
    """Keys and values by prefix, `[layers, 2, kv_heads, tokens, head_dim]` each. As many as
    `budget` allows. Nothing is evicted: an epoch reads every prefix once, and
    of anything read in a circle the best part to keep is a fixed one.
    """

    def __init__(self, model: PreTrainedModel, budget: Budget) -> None:
        self._model = model
        self._room: dict[Tier, int] = {tier: getattr(budget, tier) for tier in TIERS}
        self._kept: dict[Prefix, Tensor] = {}
        self._near: set[Prefix] = set()  # the prefixes in the model's own memory
        # Whether to pin the host's copies, so that copying them to the device does not wait.
        self._pins = model.device.type == "cuda"

    @functools.cached_property
    def bytes_per_token(self) -> int:
        """The bytes that one token of a prefix takes. Raises GuardError if the model's cache is not
        plain keys and values of every position.
        """
        return self._computed([(0,)])[(0,)].nbytes

    def fill(self, prefixes: Iterable[Prefix]) -> int:
        """Compute and keep the longest of `prefixes` that there is room for. Returns how many
        tokens there is none for. A resumed run reads the same states up to rounding: which are
        kept, and what a prefix is computed beside, depends on the room.
        """
        wanted = set(prefixes) - self._kept.keys()
        if not wanted:
            return 0
        tiers: dict[Prefix, Tier] = {}
        left_out = 0
        for prefix in sorted(wanted, key=lambda prefix: (-len(prefix), prefix)):
            tier = self._tier_for(prefix)
            if tier is None:
                left_out += len(prefix)
            else:
                tiers[prefix] = tier
        tokens = sum(map(len, tiers))
        bar = tqdm(total=tokens, desc="prefixes", unit="token", unit_scale=True, leave=False)
        with bar:
            for part in _passes(list(tiers)):
                self._keep(self._computed(part), tiers)
                bar.update(sum(map(len, part)))
        return left_out

    def bytes_to_fetch(self, prefix: Prefix) -> int:
        """The bytes that reading it takes in the model's memory: none if it lies there already."""
        if prefix in self._near:
            return 0
        return self.bytes_per_token * len(prefix)

    def read(self, prefixes: Sequence[Prefix]) -> list[Tensor]:
        """Keys and values of distinct `prefixes`, where the model is. Do not write to them: those
        that lie there are not copied. Raises GuardError if the model's cache is not plain keys and
        values of every position.
        """
        states = {prefix: self._kept[prefix] for prefix in prefixes if prefix in self._kept}
        for part in _passes([prefix for prefix in prefixes if prefix not in self._kept]):
            states |= self._computed(part)
        return [states[prefix].to(self._model.device, non_blocking=True) for prefix in prefixes]

    def _tier_for(self, prefix: Prefix) -> Tier | None:
        """The first tier with room for it, which is then taken; None if there is none."""
        for tier, room in self._room.items():
            taken = self.bytes_per_token * len(prefix)
            if tier == "host" and self._pins:
                # PyTorch's allocator of pinned memory rounds up to a power of two.
                taken = 1 << (taken - 1).bit_length()
            if taken <= room:
                self._room[tier] -= taken
                return tier
        return None

    def _keep(self, states: dict[Prefix, Tensor], tiers: dict[Prefix, Tier]) -> None:
        for prefix, kv in states.items():
            is_near = tiers[prefix] == "device" or self._model.device.type == "cpu"
            if is_near:
                self._near.add(prefix)
            else:
                kv = kv.cpu().pin_memory() if self._pins else kv.cpu()
            self._kept[prefix] = kv

    @torch.no_grad()
    def _computed(self, prefixes: Sequence[Prefix]) -> dict[Prefix, Tensor]:
        """Keys and values from one pass. Prefixes are padded on the right, which no token before
        attends to. How all of them begin, such as the instructions, is computed once.
        """
        shared = _shared_tokens(prefixes)
        ids = pad_sequence(list(map(torch.tensor, prefixes)), batch_first=True)
        ids = ids.to(self._model.device)
        cache = None
        with by_onednn(self._model):
            if len(prefixes) > 1 and shared >= SHORTEST_OPENING:
                cache = self._cache(ids[:1, :shared])
                _keys_and_values(cache)  # of another kind it may not be repeated
                cache.batch_repeat_interleave(len(prefixes))
                ids = ids[:, shared:]
            cache = self._cache(ids, cache)
        all_states = torch.stack([torch.stack(pair) for pair in _keys_and_values(cache)])
        return {
            prefix: all_states[:, :, row, :, : len(prefix)].clone()
            for row, prefix in enumerate(prefixes)
        }

    def _cache(self, ids: Tensor, before: Any = None) -> Any:
        """The model's cache of tokens `[rows, tokens]` that stand behind those of `before`."""
        output = self._model.base_model(input_ids=ids, past_key_values=before, use_cache=True)
        return output.past_key_values


def _shared_tokens(prefixes: Sequence[Prefix]) -> int:
    """How many tokens all of them begin with, less than the shortest has."""
    shared = 0
    shortest = min(map(len, prefixes))
    first, last = min(prefixes), max(prefixes)  # in this order, any other begins as these two do
    while shared < shortest - 1 and first[shared] == last[shared]:
        shared += 1
    return shared


def _passes(prefixes: Sequence[Prefix]) -> Iterator[list[Prefix]]:
    for rows in by_length([len(prefix) for prefix in prefixes], PASS_TOKENS):
        yield [prefixes[row] for row in rows]


def _keys_and_values(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Each layer's keys and values, of one shape. Raises GuardError for any other cache."""
    pairs: list[tuple[Tensor, Tensor]] = []
    shapes: set[torch.Size | None] = set()
    for layer in getattr(cache, "layers", [None]):
        if isinstance(cache, DynamicCache) and type(layer) is DynamicLayer:
            pairs.append((cast(Tensor, layer.keys), cast(Tensor, layer.values)))
            shapes |= {pairs[-1][0].shape, pairs[-1][1].shape}
        else:
            shapes.add(None)
    if len(shapes) != 1 or None in shapes:
        problem = "this base does not keep the keys and values of every position"
        remedy = "Train only methods that act from the whole prompt, such as a LoRA (make train "
        remedy += "RULE=... METHOD=...), or use a base with full attention in every layer"
        raise GuardError(problem, got=type(cache).__name__, remedy=remedy)
    return pairs


GIB = 2**30
SHORTEST_OPENING = 16  # tokens that are worth a pass of their own
# The share of the memory that is free at the start, unless the recipe states how much.
FREE_SHARE = 0.5
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Budget:
    """Bytes of keys and values in each tier. On a CPU the device's memory is the host's: leave it
    at 0.
    """

    device: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host


def budget_of(job: Job, device: torch.device) -> Budget:
    """The sizes that the recipe states, within what is free; else a share of what is free."""
    stated = job.recipe.prefix_cache_gib
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return Budget(
        device=_taken(job, "device", stated.device, free_device),
        host=_taken(job, "host", stated.host, free_memory()),
    )


def free_memory(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The bytes of host memory that are free on the machine and within the limits of the process's
    control group and of those above it (containers, services), of either version. Pages of files
    that the kernel can drop count as free; a limit that cannot be read does not count.
    """
    free = [int(psutil.virtual_memory().available)]
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _free_in_groups(cgroups, path, "max", "current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
            free += _free_in_groups(cgroups / "memory", path, *names)
    return max(0, min(free))


def _free_in_groups(root: Path, path: str, limit: str, usage: str, inactive: str) -> Iterator[int]:
    """The bytes left in a group and in each above it. The names are of its version's files."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        most = _text(group / f"memory.{limit}").strip()
        used = _text(group / f"memory.{usage}").strip()
        if most.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            yield int(most) - int(used) + int(stat.get(inactive, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _taken(job: Job, tier: Tier, stated_gib: float | None, free: int) -> int:
    if stated_gib is None:
        return int(free * FREE_SHARE)
    if stated_gib * GIB > free:
        resource = {"device": "GPU memory", "host": "memory"}[tier]
        problem = f"not enough {resource}"
        where = f"recipe {job.recipe.name}: prefix_cache_gib.{tier}"
        got = f"{stated_gib:g} GiB, {free / GIB:.1f} free"
        remedy = "Lower it, or free some"
        raise GuardError(problem, where=where, got=got, remedy=remedy)
    return int(stated_gib * GIB)
