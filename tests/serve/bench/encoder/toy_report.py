"""An encoder's report with made-up times. Tests only."""

from __future__ import annotations

from serve.bench.encoder.report import NOBODY, EncoderCell, EncoderReport
from serve.bench.report import Spread


def toy_cells(model: str, method: str, *walls_ms: float) -> list[EncoderCell]:
    """Cells of 1, 10 and 100 rules that took so long."""
    cells: list[EncoderCell] = []
    for rules, wall_ms in zip((1, 10, 100), walls_ms, strict=True):
        cell = EncoderCell(
            model=model,
            method=method,
            tokens=10,
            rules=rules,
            wall_ms=Spread.of([wall_ms]),
            computed_tokens=1,
            forward_passes=1,
            swap_ins=0,
        )
        cells.append(cell)
    return cells


def toy_report(inputs: str = "inputs", repeats: int = 1, beside: str = NOBODY) -> EncoderReport:
    """An encoder that takes 1 ms a rule, alone or beside a decoder that takes 10 ms for all."""
    cells = toy_cells("minilm", "lora", 1, 10, 100)
    if beside != NOBODY:
        cells += toy_cells(beside, "alora", 10, 10, 10)
    return EncoderReport(
        commit="abc1234",
        hardware="two cores",
        versions={},
        model="minilm",
        peak_memory_mib=1.0,
        inputs=inputs,
        threads=2,
        engine={},
        beside=beside,
        engine_beside={},
        adapters={"minilm": {"lora": "trained"}},
        repeats=repeats,
        cells=tuple(cells),
    )
