"""What HTTP adds, measured on the real server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench import http
from serve.bench.http import judged_answer
from serve.bench.report import GridReport
from tests.serve.bench.toy_bench import bench_on


def test_an_answer_that_leaves_a_rule_unjudged_is_an_error() -> None:
    request = httpx.Request("POST", "http://here")
    answer = {"verdict": "violation", "unjudged": []}
    assert judged_answer(httpx.Response(200, json=answer, request=request)) == answer
    answer["unjudged"] = [{"rule": "one", "reason": "no"}]
    with pytest.raises(GuardError, match="a rule was not judged"):
        judged_answer(httpx.Response(200, json=answer, request=request))


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_check_over_http_takes_what_its_engine_takes_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "WARM_UP", 1)
    bench_on("http", tmp_path, "--repeats", "2", recipe=load_recipe("tiny")).main()
    report = GridReport.load(tmp_path / "http_bench.json")
    assert [(row.cell["tokens"], row.cell["rules"]) for row in report.rows] == [
        *((100, rules) for rules in (1, 20)),
        *((1000, rules) for rules in (1, 20)),
    ]
    for row in report.rows:
        assert 0 < row.measured["engine_ms"].min <= row.median("check_ms")
        assert row.measured["http_ms"].min > 0
    assert report.peak_memory_mib > 100
