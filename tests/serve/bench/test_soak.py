"""The soak of seconds, and what HTTP adds, on one real server; what the soak says of growth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.api.app import create_app
from serve.bench import http, soak
from serve.bench.http import judged_answer
from serve.bench.report import GridReport, MeasuredRow, Spread
from serve.bench.soak import SoakBench
from serve.bench.workload.server import (
    AT_ONCE,
    OpenLoopTraffic,
    random_runs,
    rule_names,
    server_process,
)
from serve.bench.workload.traffic import RULES
from tests.serve.bench.test_report import report_of
from tests.serve.bench.toy_bench import bench_on
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine


def soak_of(tmp_path: Path, *words: str) -> SoakBench:
    bench: SoakBench = bench_on("soak", tmp_path, *words, recipe=load_recipe("tiny"))
    return bench


def window(number: int, check_ms: float | None, memory_mib: float) -> MeasuredRow:
    measured = {"memory_mib": Spread.of([memory_mib]), "goodput_per_second": Spread.of([1.0])}
    if check_ms is not None:
        measured["check_ms"] = Spread.of([check_ms])
    return MeasuredRow(cell={"window": number, "share": 0.7}, repeats=1, measured=measured)


def test_growth_is_of_the_last_third_over_the_first_without_the_warm_up(tmp_path: Path) -> None:
    """A window without an answer has no latencies, and the others have."""
    memory = [100.0, 200.0, 201.0, 199.0, 250.0, 260.0, 270.0, 300.0, 310.0, 290.0]
    report = report_of([window(number, 50.0, mib) for number, mib in enumerate(memory)])
    assert len(soak_of(tmp_path).cells()) == 60
    with pytest.raises(GuardError, match=r"too few minutes \(got 7\). Ask for at least 8"):
        soak_of(tmp_path, "--minutes", "7").cells()
    bench = soak_of(tmp_path, "--quick")
    assert bench.growth(report, "memory_mib") == 300.0 / 200.0
    assert bench.growth(report, "check_ms") == 1.0
    answered = [50.0, 50.0, None, 100.0]
    report = report_of([window(n, check_ms, 100.0) for n, check_ms in enumerate(answered)])
    assert "latency 2.000x; memory 1.000x;" in " ".join(bench.notes(report))
    assert [len(panel.rows) for panel in bench.panels(report)] == [3, 4]
    nothing = report_of([window(number, None, 100.0) for number in range(4)])
    assert bench.growth(nothing, "check_ms") is None and len(bench.panels(nothing)) == 1
    assert "latency not measured" in " ".join(bench.notes(nothing))


class ToyServer(NamedTuple):
    """Its process ends after so many looks at its memory."""

    address: str
    looks: Iterator[int]

    def memory_mib(self) -> float:
        if next(self.looks, None) is None:
            raise GuardError("the server has ended")
        return 100.0


def test_what_was_soaked_is_reported(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    engine = ToyEngine(dict.fromkeys(rule_names(RULES[1]), -2.0))
    monkeypatch.setattr(soak, "random_runs", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(OpenLoopTraffic, "saturation", lambda _: 20.0)
    monkeypatch.setattr(soak, "WINDOW_S", 0.3)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        server = ToyServer(str(client.base_url), iter(range(2)))
        monkeypatch.setattr(soak, "server_process", lambda *_: contextlib.nullcontext(server))
        with pytest.raises(GuardError, match="ended early"):
            soak_of(tmp_path, "--minutes", "9").main()
        with pytest.raises(GuardError, match=r"^the server has ended"):  # nothing to report
            soak_of(tmp_path, "--minutes", "9").main()
    report = GridReport.load(tmp_path / "soak_bench.json")
    assert len(report.rows) == 2 and report.ended_by == "the server has ended"
    assert {row.median("answered") for row in report.rows} == {4}


def test_an_answer_that_leaves_a_rule_unjudged_is_an_error() -> None:
    request = httpx.Request("POST", "http://here")
    answer = {"verdict": "violation", "unjudged": []}
    assert judged_answer(httpx.Response(200, json=answer, request=request)) == answer
    answer["unjudged"] = [{"rule": "one", "reason": "no"}]
    with pytest.raises(GuardError, match="a rule was not judged"):
        judged_answer(httpx.Response(200, json=answer, request=request))


@pytest.mark.slow
def test_a_real_server_is_measured_over_http_and_soaked(
    tmp_path: Path, monkeypatch: MonkeyPatch, uncompiled: None
) -> None:
    """One server of the tiny base's process, as both benchmarks start it."""
    recipe = load_recipe("tiny")
    monkeypatch.setattr(http, "WARM_UP", 1)
    monkeypatch.setattr(soak, "QUICK_WINDOW_S", 0.5)
    monkeypatch.setattr("serve.bench.workload.server.SATURATING_CHECKS", AT_ONCE // 2)
    with random_runs(recipe, RULES[1]) as runs, server_process(recipe, runs) as server:
        for module in (http, soak):
            started = contextlib.nullcontext(server)
            monkeypatch.setattr(module, "server_process", lambda *_, server=started: server)
            served = contextlib.nullcontext(runs)
            monkeypatch.setattr(module, "random_runs", lambda *_, served=served: served)
        bench_on("http", tmp_path, "--repeats", "2", recipe=recipe).main()
        soak_of(tmp_path, "--quick").main()
    report = GridReport.load(tmp_path / "http_bench.json")
    cells = [(row.cell["tokens"], row.cell["rules"]) for row in report.rows]
    assert cells == [(100, 1), (100, 20), (1000, 1), (1000, 20)]
    for row in report.rows:
        assert 0 < row.measured["engine_ms"].min <= row.median("check_ms")
        assert row.measured["http_ms"].min > 0
    assert report.peak_memory_mib > 100
    report = GridReport.load(tmp_path / "soak_bench_quick.json")
    assert report.ended_by is None and len(report.rows) == 4
    for row in report.rows:
        assert row.median("failed") == 0 < row.median("answered")
        assert 100 < row.median("memory_mib") < 20_000
    assert report.facts["saturation, checks a second"]
    assert (tmp_path / "soak_bench_quick.png").is_file()
