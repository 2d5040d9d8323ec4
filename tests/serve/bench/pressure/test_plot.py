"""The pressure benchmark's plot, of made-up figures."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from serve.bench.pressure.plot import draw
from tests.serve.bench.pressure.toy_report import toy_report


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    draw(toy_report(), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1050, 675)
