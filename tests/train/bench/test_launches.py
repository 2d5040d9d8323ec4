"""The count of a training step's launches, on the tiny base."""

from __future__ import annotations

import pytest

from train.bench.launches import count, table

pytestmark = pytest.mark.slow


def test_padded_launches_do_not_grow_with_the_conversations_as_those_in_place_do() -> None:
    few, many = count("tiny", 2, 1), count("tiny", 16, 1)
    assert (few.conversations, many.conversations, many.adapters) == (2, 16, 1)
    assert few.tokens < many.tokens < 16 * 2000
    more_in_place = sum(many.in_place.values()) - sum(few.in_place.values())
    more_padded = sum(many.padded.values()) - sum(few.padded.values())
    assert many.in_place["bmm"] > many.padded["bmm"]
    assert more_padded < 0.3 * more_in_place
    assert many.in_place["_fused_adamw_"] == many.padded["_fused_adamw_"] >= 1
    text = table([few, many])
    assert f"| 16 | {many.tokens:,} | {sum(many.in_place.values()):,} |" in text
