"""Neighbours that go through the model together, packed greedily. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from train.examples import Row
from train.prefix.cache import Prefix

Item = TypeVar("Item")


@dataclass
class Pack(Generic[Item]):
    """Neighbours, the distinct prefixes that they read, and the bytes that these take."""

    items: list[Item] = field(default_factory=list)
    prefixes: set[Prefix] = field(default_factory=set)
    prefix_bytes: int = 0


@dataclass(frozen=True)
class Packer(Generic[Item]):
    """Puts neighbours into one pack as long as the next one fits, and at least one into each.
    `prefixes` names those that an item reads, `size` the bytes of a prefix; `fits` decides whether
    an item that adds so many bytes of prefixes may join a pack that is not empty.
    """

    prefixes: Callable[[Item], Iterable[Prefix]]
    size: Callable[[Prefix], int]
    fits: Callable[[Pack[Item], Item, int], bool]

    def packs(self, items: Iterable[Item]) -> Iterator[Pack[Item]]:
        """Yield all `items` in their order, in packs; each pack is let go of before the next is
        started.
        """
        pack: Pack[Item] = Pack()
        for item in items:
            new_prefixes, new_bytes = self._added(pack, item)
            if pack.items and not self.fits(pack, item, new_bytes):
                yield pack
                pack = Pack()
                new_prefixes, new_bytes = self._added(pack, item)
            pack.items.append(item)
            pack.prefixes |= new_prefixes
            pack.prefix_bytes += new_bytes
        if pack.items:
            yield pack

    def _added(self, pack: Pack[Item], item: Item) -> tuple[set[Prefix], int]:
        new_prefixes = set(self.prefixes(item)) - pack.prefixes
        return new_prefixes, sum(map(self.size, new_prefixes))


def prefix_of(row: Row) -> Prefix:
    """The tokens before the invocation, whose keys and values are the base's."""
    return row.prompt.token_ids[: row.prompt.invocation_start]


def suffix_of(row: Row) -> Sequence[int]:
    """The tokens that an aLoRA computes."""
    return row.prompt.token_ids[row.prompt.invocation_start :]


def longest_suffix(rows: Iterable[Row]) -> int:
    return max(len(row.prompt.token_ids) - row.prompt.invocation_start for row in rows)
