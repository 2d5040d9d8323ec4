"""What is measured of an encoder's rules: how much each method reads, and with how many slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.layout import Runs
from serve.bench.encoder.measure import (
    EncoderGrid,
    EncoderSample,
    MethodOnBase,
    PlannedCell,
    measure,
    methods_on,
    slots,
)
from tests.serve.bench.small_engine import small_recipe
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule


@pytest.mark.slow
def test_frozen_heads_read_a_conversation_once_and_adapters_once_each(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    save_encoder_head(runs.adapter("minilm", "toy", "head"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    with methods_on(eager, runs, 3, engines=1) as contestants:
        cells = measure(eager, contestants, EncoderGrid((1, 3), (80,), 2))
    assert {of_method.method: of_method.weights for of_method in contestants} == {
        "lora": "trained",
        "head": "trained",
    }
    computed = {(cell.method, cell.rules): cell.computed_tokens for cell in cells}
    assert computed["lora", 3] == 3 * computed["lora", 1]
    assert computed["head", 3] == computed["head", 1] == computed["lora", 1] > 0
    assert {cell.forward_passes for cell in cells} == {1}  # three adapters in one batch
    assert all(0 < cell.wall_ms.min <= cell.wall_ms.max for cell in cells)


def test_the_shortest_cells_warm_up_and_every_cell_is_measured_in_each_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[tuple[int, int]] = []

    def check(cell: PlannedCell, messages: Sequence[Message]) -> EncoderSample:
        checked.append((cell.tokens, cell.rules))
        return EncoderSample(float(len(checked)), 1, 1, 0)

    monkeypatch.setattr("serve.bench.encoder.measure._check", check)
    no_engine: Any = None
    contestant = MethodOnBase("minilm", "head", "trained", no_engine, ["a", "b"])
    cells = measure(recipe(), [contestant], EncoderGrid((1, 2), (60, 120), 2))
    assert checked[:2] == [(60, 1), (60, 2)]
    assert sorted(checked[2:]) == sorted([(60, 1), (60, 2), (120, 1), (120, 2)] * 2)
    assert min(cell.wall_ms.min for cell in cells) == 3.0  # the first two do not count


def test_every_adapter_has_a_slot_and_heads_need_none() -> None:
    assert slots(recipe(), 3) == 3  # its other method is a head
    assert slots(small_recipe(), 3) == 6  # of both methods
    heads = {"head": recipe().methods["head"]}
    assert slots(recipe().model_copy(update={"methods": heads}), 3) == 1
