"""Which rule is on which shard: the same at every start, and as many rules on each.

Rendezvous hashing (Thaler and Ravishankar, 1998): of the shards that are not full, a rule is on the
one whose hash with its name is largest. So one more rule moves few others, and none depends on the
order in which rules are named. Knows nothing of what the rules say.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from guard.errors import GuardError


def placed(rules: Iterable[str], shards: int) -> dict[str, int]:
    """The shard of each rule, from 0; no shard has two rules more than another.

    Raises GuardError for more shards than rules.
    """
    names = list(rules)
    if shards > max(1, len(names)):
        remedy = "Ask for fewer with SHARDS="
        raise GuardError(f"{len(names)} rules cannot be split", got=shards, remedy=remedy)
    share, left_over = divmod(len(names), shards)
    counts = [0] * shards
    placement: dict[str, int] = {}
    for name in sorted(names, key=_hashed):
        has_room_for_one_more = sum(count > share for count in counts) < left_over
        free = _below(share + has_room_for_one_more, counts)
        placement[name] = _preferred(name, free)
        counts[placement[name]] += 1
    return {name: placement[name] for name in names}


def split(folders: Mapping[str, Path], shards: int) -> list[dict[str, Path]]:
    """The folders that each shard serves at first. Raises as `placed`."""
    placement = placed(folders, shards)
    parts: list[dict[str, Path]] = [{} for _ in range(shards)]
    for rule, folder in folders.items():
        parts[placement[rule]][rule] = folder
    return parts


def place_for(rule: str, counts: Sequence[int], candidates: Sequence[int]) -> int:
    """The shard of one more rule, of these candidates, while no other moves; `counts` are the rules
    that each shard has.
    """
    limit = math.ceil((sum(counts) + 1) / len(counts))
    free = [shard for shard in _below(limit, counts) if shard in candidates]
    if not free:
        fewest = min(counts[shard] for shard in candidates)
        free = [shard for shard in candidates if counts[shard] == fewest]
    return _preferred(rule, free)


def _below(limit: int, counts: Sequence[int]) -> list[int]:
    return [shard for shard, count in enumerate(counts) if count < limit]


def _preferred(rule: str, shards: Sequence[int]) -> int:
    return max(shards, key=lambda shard: _hashed(f"{shard} {rule}"))


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
