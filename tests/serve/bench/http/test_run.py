"""The benchmark of the server, small, on the real server; its table, plot and report."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from PIL import Image

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench.http.load import HttpRun, SentCheck
from serve.bench.http.overhead import in_turns, judged_answer
from serve.bench.http.run import HttpReport, _row, draw, run, table
from serve.bench.http.server import RunningServer, server_environment


def test_a_row_counts_what_was_late_shed_and_lost() -> None:
    statuses = [(200, 0.1), (200, 0.3), (200, 7.0), (503, 0.0), (0, 1.0), (500, 1.0)]
    sent = tuple(SentCheck(status, latency_s, latency_s - 0.05) for status, latency_s in statuses)
    row = _row(HttpRun(sent, wall_s=4.0), 1.5, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0], 5.0)
    assert (row.answered, row.late, row.shed, row.failed) == (3, 1, 1, 2)
    assert row.goodput_per_second == 0.5 and row.offered_per_second == 2.0
    assert row.p50_ms == pytest.approx(300)


def test_a_run_without_an_answer_has_no_latencies() -> None:
    row = _row(HttpRun((SentCheck(503, 0.1, 0.1),), wall_s=4.0), 1.5, [0.5], 5.0)
    assert (row.p50_ms, row.p95_ms, row.p99_ms, row.shed) == (None, None, None, 1)


def test_engine_and_server_are_asked_in_turns_and_the_other_one_first_in_every_pair() -> None:
    asked: list[str] = []
    conversations = [(Message("user", str(number)),) for number in range(6)]

    def ask(way: str) -> Callable[[tuple[Message, ...]], None]:
        return lambda messages: asked.append(f"{way} {messages[0].content}")

    took_ms = in_turns((ask("engine"), ask("http")), conversations)
    assert asked == ["engine 0", "http 1", "http 2", "engine 3", "engine 4", "http 5"]
    assert [len(of_way) for of_way in took_ms] == [3, 3]


def test_an_answer_that_leaves_a_rule_unjudged_is_an_error() -> None:
    request = httpx.Request("POST", "http://here")
    answer = {"verdict": "violation", "unjudged": []}
    assert judged_answer(httpx.Response(200, json=answer, request=request)) == answer
    answer["unjudged"] = [{"rule": "one", "reason": "no"}]
    with pytest.raises(GuardError, match="a rule was not judged"):
        judged_answer(httpx.Response(200, json=answer, request=request))


def test_a_server_s_threads_wait_as_those_of_make_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert server_environment()["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert server_environment()["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert "GOMP_SPINCOUNT" not in server_environment()


def test_the_memory_of_a_server_that_has_ended_is_an_error() -> None:
    process = subprocess.Popen(["sleep", "60"], text=True)
    server = RunningServer("http://here", process)
    assert 0 < server.memory_mib() < 100
    process.kill()
    process.wait()
    with pytest.raises(GuardError, match="the server has ended"):
        server.memory_mib()


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_the_server_is_measured_beside_its_engine_and_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.bench.http.run.peak_of_processes_mib", lambda: 1e6)
    report = run(load_recipe("tiny"), checks=10, repeats=2, shares=(0.5,))
    assert report.overhead is not None and report.saturation_per_second is not None
    assert report.overhead.http_ms.min > 0 and report.overhead.engine_ms.min > 0
    assert report.peak_memory_mib == 1e6  # the server's
    (row,) = report.rates
    assert row.failed == 0 < row.answered and row.answered + row.shed == 10
    path = tmp_path / "http_bench.json"
    report.save(path)
    assert HttpReport.load(path) == report
    assert "saturation" in table(report) and "20 rules x 1,000 tokens" in table(report)
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
