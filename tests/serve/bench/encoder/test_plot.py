"""The encoder's plot, of made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench.encoder.plot import draw
from serve.bench.encoder.report import NOBODY
from tests.serve.bench.drawn import drawn, lines_of, points_of
from tests.serve.bench.encoder.toy_report import toy_report

ENCODER = [(1.0, 1.0), (10.0, 10.0), (100.0, 100.0)]  # rules, ms
DECODER = [(1.0, 10.0), (10.0, 10.0), (100.0, 10.0)]


@pytest.mark.parametrize("beside", [NOBODY, "tiny"])
def test_every_method_has_a_line_and_the_decoder_s_is_dashed(beside: str, tmp_path: Path) -> None:
    (axes,) = drawn(draw, toy_report(beside=beside), tmp_path / "plot.png").axes
    lines = lines_of(axes)
    expected = {"LoRA on minilm": ENCODER}
    if beside != NOBODY:
        expected["aLoRA on tiny"] = DECODER
    assert {label: points_of(line) for label, line in lines.items()} == expected
    styles = {label: line.get_linestyle() for label, line in lines.items()}
    assert styles == {label: "-" if "minilm" in label else "--" for label in expected}


def test_every_length_has_a_panel(tmp_path: Path) -> None:
    report = toy_report()
    longer = [
        cell.model_copy(update={"tokens": 2000, "wall_ms": cell.wall_ms.of([7.0])})
        for cell in report.cells
    ]
    both = report.model_copy(update={"cells": (*report.cells, *longer)})
    short, long = drawn(draw, both, tmp_path / "plot.png").axes
    assert [axes.get_title() for axes in (short, long)] == ["10 tokens", "2,000 tokens"]
    assert points_of(lines_of(short)["LoRA on minilm"]) == ENCODER
    assert points_of(lines_of(long)["LoRA on minilm"]) == [(1.0, 7.0), (10.0, 7.0), (100.0, 7.0)]
