from __future__ import annotations

from pathlib import Path

from PIL import Image

from serve.plan.plot import draw
from tests.serve.plan.test_report import report


def test_the_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    draw(report(), path)
    with Image.open(path) as image:
        assert image.size[0] > 900
