"""Neighbours are packed greedily, and a prefix that several read counts once."""

from __future__ import annotations

from train.prefix.cache import Prefix
from train.prefix.packer import Pack, Packer

Reader = tuple[str, list[Prefix]]


def packed(readers: list[Reader], room: int) -> list[list[str]]:
    def fits(pack: Pack[Reader], reader: Reader, more_bytes: int) -> bool:
        return pack.prefix_bytes + more_bytes <= room

    packer = Packer[Reader](prefixes=lambda reader: reader[1], size=len, fits=fits)
    return [[name for name, _ in pack.items] for pack in packer.packs(readers)]


def test_neighbours_share_a_pack_while_there_is_room() -> None:
    readers = [("a", [(1, 2)]), ("b", [(3, 4)]), ("c", [(5, 6)])]
    assert packed(readers, 4) == [["a", "b"], ["c"]]
    assert packed(readers, 6) == [["a", "b", "c"]]


def test_a_prefix_that_is_read_already_takes_nothing() -> None:
    readers = [("a", [(1, 2)]), ("b", [(1, 2), (1, 2)]), ("c", [(1, 2), (3,)])]
    assert packed(readers, 2) == [["a", "b"], ["c"]]


def test_what_never_fits_is_alone_and_nothing_gives_no_pack() -> None:
    assert packed([("a", [(1, 2)]), ("b", [(3, 4)])], 0) == [["a"], ["b"]]
    assert packed([], 9) == []
