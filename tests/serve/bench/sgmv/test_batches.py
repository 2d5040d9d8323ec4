from __future__ import annotations

from serve.bench.sgmv.batches import batches
from tests.serve.bench.sgmv.toy_batches import FEW


def test_the_batches_are_those_of_fan_outs_and_fleets() -> None:
    by_name = {batch.name: batch for batch in batches(16)}
    assert by_name["100 adapters x 3 tokens"].tokens == 300
    assert set(by_name["the same, ranks 16, 8 and 4"].ranks) == {16, 8, 4}
    assert by_name["12 conversations x 20 adapters x 3 tokens"].tokens == 720


def test_every_token_has_its_segment_s_slot() -> None:
    assert FEW.slot_of_token == [2, 2, 2, 0, 0, 0, 1, 1, 1, 1]
    assert FEW.tokens == 10
