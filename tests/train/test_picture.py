from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from train.picture import RELIABILITY, draw_reliability

DOTS = "#D55E00"


def row(p: float, violates: float) -> dict[str, Any]:
    return {"p": p, "violates": violates, "ci95": [violates - 0.01, violates + 0.01]}


def dots(bins: list[dict[str, Any]], folder: Path) -> Any:
    """Where the picture has the colour of the dots: rows and columns of pixels."""
    draw_reliability(bins, "a title", folder)
    pixels = imread(folder / RELIABILITY)[..., :3]
    return (abs(pixels - to_rgb(DOTS)).max(axis=-1) < 0.02).nonzero()


def test_a_bin_stands_over_its_probability_at_its_share_of_violations(tmp_path: Path) -> None:
    rows_low, columns_low = dots([row(0.1, 0.2)], tmp_path)
    rows_high, columns_high = dots([row(0.9, 0.8)], tmp_path)
    assert len(columns_low) > 20
    assert columns_low.mean() + 200 < columns_high.mean()
    assert rows_high.mean() + 150 < rows_low.mean()  # the first row is the topmost


def test_a_share_outside_its_interval_is_drawn(tmp_path: Path) -> None:
    """Rounding may put an end of the interval to the wrong side."""
    rows, _ = dots([{"p": 0.5, "violates": 0.0, "ci95": [0.001, 0.2]}], tmp_path)
    assert len(rows) > 20
