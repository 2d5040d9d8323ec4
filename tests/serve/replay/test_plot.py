"""A picture comes out, of few and of many conversations."""

from __future__ import annotations

import numpy as np
import pytest

from serve.replay.plot import MAX_POINTS, draw_replay
from serve.replay.summary import Probabilities


@pytest.mark.parametrize("count", [1, MAX_POINTS + 1000])
def test_a_png_is_drawn(count: int) -> None:
    p = np.linspace(0, 1, count)
    png = draw_replay(Probabilities(p, p[::-1], p > 0.5), (0.5, 0.4), "mild")
    assert png.startswith(b"\x89PNG") and len(png) > 5000
