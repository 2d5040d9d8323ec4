"""The encoder's plot, of made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from serve.bench.encoder.plot import draw
from serve.bench.encoder.report import NOBODY
from tests.serve.bench.encoder.toy_report import toy_report


@pytest.mark.parametrize("beside", [NOBODY, "tiny"])
def test_the_plot_has_a_panel_for_each_length(beside: str, tmp_path: Path) -> None:
    draw(toy_report(beside=beside), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (825, 750)
