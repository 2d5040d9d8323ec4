"""The prefixes of a pass: which products their attention is cut into, and how a device decides."""

from __future__ import annotations

import random

import pytest
import torch
from pytest import MonkeyPatch

from train.prefix import prefixes
from train.prefix.prefixes import PADDING, Part, Prefixes, joined_parts, separate_parts

WEIGHTS = 8 * 4 * 24  # of a suffix at a token: KV heads, heads on each, tokens


def random_lengths(count: int) -> list[int]:
    rng = random.Random(count)
    lengths = [300 * rng.lognormvariate(0, 0.6) for _ in range(count)]
    return [round(min(2000, max(40, length))) for length in lengths]


def both_parts(lengths: list[int], readers: list[int]) -> tuple[list[Part], list[Part]]:
    """Separate and joined, for so many readers of each prefix."""
    suffixes_on, first = [], 0
    for count in readers:
        suffixes_on.append(list(range(first, first + count)))
        first += count
    separate = separate_parts(lengths, suffixes_on, WEIGHTS)
    return separate, joined_parts(lengths, separate, WEIGHTS)


def padded_tokens(part: Part, lengths: list[int]) -> int:
    longest = max(lengths[prefix] for prefix in part.prefixes)
    return longest * len(part.prefixes) * part.readers


def needed_tokens(part: Part, lengths: list[int]) -> int:
    pairs = zip(part.prefixes, part.suffixes, strict=True)
    return sum(lengths[prefix] * len(set(suffixes)) for prefix, suffixes in pairs)


@pytest.mark.parametrize("most_readers", [1, 2, 12])
def test_joined_parts_are_few_waste_little_and_hold_all_suffixes(most_readers: int) -> None:
    rng = random.Random(0)
    lengths = random_lengths(100)
    readers = [rng.randint(1, most_readers) for _ in lengths]
    separate, joined = both_parts(lengths, readers)
    pairs = {(part.prefixes[0], suffix) for part in separate for suffix in part.suffixes[0]}
    assert len(pairs) == sum(readers)
    held = []
    for part in joined:
        assert {len(suffixes) for suffixes in part.suffixes} == {part.readers}
        assert padded_tokens(part, lengths) <= PADDING * needed_tokens(part, lengths)
        assert padded_tokens(part, lengths) * WEIGHTS <= prefixes.MAX_WEIGHTS
        for prefix, suffixes in zip(part.prefixes, part.suffixes, strict=True):
            held += [(prefix, suffix) for suffix in set(suffixes)]
    assert sorted(held) == sorted(pairs)
    assert len(joined) < len(separate) / 2


def test_parts_grow_with_unlike_prefixes_not_with_many(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_WEIGHTS", 2**40)
    for count in (100, 1000):
        lengths = random_lengths(count)
        assert len(both_parts(lengths, [1] * count)[1]) < 10


def test_a_prefix_of_too_many_readers_is_read_in_parts(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_WEIGHTS", 2 * 50 * WEIGHTS)
    separate, joined = both_parts([50, 200], [5, 1])
    assert [part.suffixes for part in separate] == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert sorted(part.readers for part in joined) == [1, 1, 2, 2]


@pytest.mark.parametrize(("device", "in_place"), [("cpu", True), ("meta", False)])
def test_prefixes_are_read_in_place_on_a_cpu_alone(device: str, in_place: bool) -> None:
    states = [torch.empty(2, 2, 2, length, 8, device=device) for length in (5, 9)]
    assert Prefixes(states, [0, 1]).in_place == in_place
    assert Prefixes(states, [0, 1], in_place=not in_place).in_place != in_place


@pytest.mark.parametrize(("copied_bytes", "copies"), [(2**30, 1), (1, 3 + 2)])
def test_copies_are_made_by_room(monkeypatch: MonkeyPatch, copied_bytes: int, copies: int) -> None:
    monkeypatch.setattr(prefixes, "COPIED_BYTES", copied_bytes)
    copied: list[range] = []
    padded = Prefixes._padded
    monkeypatch.setattr(
        Prefixes,
        "_padded",
        lambda self, part, layers: (copied.append(layers), padded(self, part, layers))[1],
    )
    states = [torch.randn(3, 2, 2, length, 8) for length in (9, 10)]
    of_pass = Prefixes(states, [0, 1], in_place=False)
    of_pass.arrange(tokens=4)
    for layer in (0, 1, 2, 2, 1, 0):  # forward, backward
        ((_, keys, values),) = of_pass.products(layer)
        assert torch.equal(keys.view(2, 2, 10, 8)[:, 1, :9], states[0][layer, 0])
        assert torch.equal(values.view(2, 2, 10, 8)[:, 0], states[1][layer, 1])
    assert len(copied) == copies
