"""The soak, of seconds, on the real server; what it says of growth."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.api.app import create_app
from serve.bench.http import soak
from serve.bench.http.server import rule_names
from serve.bench.http.soak import SoakReport, SoakWindow, draw, run, table
from serve.bench.http.traffic import OpenLoopTraffic
from serve.bench.workload.arrivals import RULES
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

SERVER_MIB = 1e6  # more than this process has


def window(minute: int, p50_ms: float | None, memory_mib: float) -> SoakWindow:
    return SoakWindow(
        minute=minute,
        checks=10,
        answered=9,
        shed=1,
        failed=0,
        p50_ms=p50_ms,
        p95_ms=p50_ms,
        memory_mib=memory_mib,
    )


def test_growth_is_of_the_last_third_over_the_first_without_the_warm_up() -> None:
    memory = [100.0, 200.0, 201.0, 199.0, 250.0, 260.0, 270.0, 300.0, 310.0, 290.0]
    windows = [window(minute, 50.0, mib) for minute, mib in enumerate(memory)]
    report = SoakReport.model_construct(windows=tuple(windows), warm_up=1)
    assert report.growth("memory_mib") == 300.0 / 200.0
    assert report.growth("p50_ms") == 1.0
    assert len(report.judged) == 9


def soaked(windows: Sequence[SoakWindow], ended_by: str | None = None) -> SoakReport:
    return SoakReport(
        commit="abc1234",
        hardware="two cores",
        versions={},
        model="tiny",
        peak_memory_mib=1.0,
        saturation_per_second=10.0,
        share=0.7,
        deadline_s=5.0,
        warm_up=1,
        windows=tuple(windows),
        ended_by=ended_by,
    )


def test_a_window_without_an_answer_has_no_latencies_and_the_others_have(tmp_path: Path) -> None:
    p50_ms = [50.0, 50.0, None, 100.0]
    report = soaked([window(minute, value, 100.0) for minute, value in enumerate(p50_ms)])
    assert report.growth("p50_ms") == 2.0
    assert "2.000x" in table(report)
    nothing = soaked([window(minute, None, 100.0) for minute in range(4)])
    assert nothing.growth("p50_ms") is None and "-" in table(nothing)
    draw(report, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").exists()


class ToyServer(NamedTuple):
    """A server whose process ends after so many looks at its memory."""

    address: str
    looks: Iterator[int]

    def memory_mib(self) -> float:
        if next(self.looks, None) is None:
            raise GuardError("the server has ended")
        return 100.0


def test_what_was_soaked_before_the_server_ended_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ToyEngine(dict.fromkeys(rule_names(RULES[1]), -2.0))
    monkeypatch.setattr(soak, "random_runs", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(OpenLoopTraffic, "saturation", lambda _: 20.0)
    monkeypatch.setattr(soak, "run", partial(run, window_s=0.3))
    monkeypatch.setattr(soak, "peak_of_processes_mib", lambda: SERVER_MIB)
    arguments = argparse.Namespace(
        model="tiny", runs=tmp_path, minutes=9, share=0.7, quick=False, bench="soak"
    )
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        server = ToyServer(str(client.base_url), iter(range(2)))
        monkeypatch.setattr(soak, "server_process", lambda *_: contextlib.nullcontext(server))
        with pytest.raises(GuardError, match="the soak ended early"):
            soak.main(arguments)
        with pytest.raises(GuardError, match="the server has ended"):  # nothing to report
            soak.main(arguments)
    report = SoakReport.load(tmp_path / "soak_bench.json")
    assert len(report.windows) == 2 and report.warm_up == 1
    assert report.peak_memory_mib == SERVER_MIB
    assert "ENDED EARLY: the server has ended" in capsys.readouterr().out


def test_a_soak_is_longer_than_its_warm_up_by_what_growth_takes() -> None:
    with pytest.raises(GuardError, match=r"too few minutes \(got 7\). Ask for at least 8"):
        run(load_recipe("tiny"), windows=7)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_server_is_soaked(tmp_path: Path) -> None:
    report = run(load_recipe("tiny"), windows=4, window_s=1.0, warm_up=1)
    assert [window.failed for window in report.windows] == [0, 0, 0, 0]
    assert report.ended_by is None
    for soaked in report.windows:
        assert soaked.answered + soaked.shed == soaked.checks > 0
        assert 100 < soaked.memory_mib < 20_000
    path = tmp_path / "soak_bench.json"
    report.save(path)
    assert SoakReport.load(path) == report
    assert "4 minutes at 70%" in table(report)
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
