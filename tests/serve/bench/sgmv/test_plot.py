"""The microbenchmark's plot, of made-up times."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from serve.bench.sgmv.plot import draw
from tests.serve.bench.sgmv.toy_report import toy_report


def test_the_plot_grows_with_the_batches(tmp_path: Path) -> None:
    draw(toy_report(), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1200, 540)
