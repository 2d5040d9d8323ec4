"""The soak, of seconds, on the real server; what it says of growth."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from guard.recipe import load_recipe
from serve.bench.http.soak import SoakReport, SoakWindow, draw, run, table


def window(minute: int, p50_ms: float, memory_mib: float) -> SoakWindow:
    return SoakWindow(
        minute=minute,
        checks=10,
        answered=9,
        shed=1,
        failed=0,
        p50_ms=p50_ms,
        p95_ms=2 * p50_ms,
        memory_mib=memory_mib,
    )


def test_growth_is_of_the_last_third_over_the_first_without_the_warm_up() -> None:
    memory = [100.0, 200.0, 201.0, 199.0, 250.0, 260.0, 270.0, 300.0, 310.0, 290.0]
    windows = [window(minute, 50.0, mib) for minute, mib in enumerate(memory)]
    report = SoakReport.model_construct(windows=tuple(windows), warm_up=1)
    assert report.growth("memory_mib") == 300.0 / 200.0
    assert report.growth("p50_ms") == 1.0
    assert len(report.judged) == 9


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_server_is_soaked(tmp_path: Path) -> None:
    report = run(load_recipe("tiny"), windows=3, window_s=1.0, warm_up=1)
    assert [window.failed for window in report.windows] == [0, 0, 0]
    for soaked in report.windows:
        assert soaked.answered + soaked.shed == soaked.checks > 0
        assert 100 < soaked.memory_mib < 20_000
    path = tmp_path / "soak_bench.json"
    report.save(path)
    assert SoakReport.load(path) == report
    assert "3 minutes at 70%" in table(report)
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
