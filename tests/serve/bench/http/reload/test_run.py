"""Rules replaced under checks, small, on the real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.recipe import load_recipe
from serve.bench.http.reload.report import ReloadReport, table
from serve.bench.http.reload.run import run


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_no_answer_is_lost_or_of_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.bench.http.reload.run.peak_of_processes_mib", lambda: 1e6)
    report = run(load_recipe("tiny"), checks=40, replacements=8, clients=4)
    assert report.errors == {} and report.unjudged_rules == 0
    assert report.wrong_version == report.no_version == 0
    assert report.right > 0.5 * report.checks * report.rules
    assert report.replacements == 8 and report.replacement_ms.min > 0
    assert report.peak_memory_mib == 1e6  # the server's
    path = tmp_path / "reload_bench.json"
    report.save(path)
    assert ReloadReport.load(path) == report
    assert "8 replacements of 8 rules during 40 checks" in table(report)
