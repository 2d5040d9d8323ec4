"""The load benchmark's plot, of the report that was kept."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from guard.layout import ROOT
from serve.bench.load.plot import draw
from serve.bench.load.report import LoadReport


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    draw(
        LoadReport.load(ROOT / "docs/benchmarks/serving/load_tiny_2cores.json"),
        tmp_path / "plot.png",
    )
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1050, 675)
