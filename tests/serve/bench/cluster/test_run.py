"""The benchmark of replicas, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench.cluster import run as benchmark
from serve.bench.cluster.measure import check_told_apart
from serve.bench.cluster.report import ClusterReport, UnderFault, table
from serve.bench.cluster.run import run

pytestmark = pytest.mark.slow


def assert_nothing_lost(fault: UnderFault | None, events: int) -> None:
    assert fault is not None and fault.events == events and fault.judged > 0
    assert (fault.lost, fault.false_allows, fault.contradicted) == (0, 0, 0)


def test_versions_that_score_texts_alike_tell_nothing_of_each_other() -> None:
    first = [0.1] * 16
    check_told_apart(first, [*first[:12], 0.2, 0.2, 0.9, 0.0])
    with pytest.raises(GuardError, match="two versions of a rule say nearly the same"):
        check_told_apart(first, [*first[:13], 0.2, 0.9, 0.0])


@pytest.mark.usefixtures("uncompiled")
def test_the_same_rules_on_two_shards_compute_the_conversation_twice() -> None:
    report = run(load_recipe("tiny"), ("shards",), repeats=2)
    assert report.shards is not None
    one, two = report.shards
    assert (one.shards, two.shards) == (1, 2)
    assert two.first_tokens == pytest.approx(one.first_tokens + one.tokens, abs=100)
    assert two.again_tokens == pytest.approx(one.again_tokens, abs=100)
    assert "2 shards, 20 rules x 1,000 tokens" in table(report)


@pytest.mark.usefixtures("uncompiled")
def test_killed_replicas_and_changed_rules_lose_no_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks_mib = iter((1e6, 2e6))  # of the parts' processes
    monkeypatch.setattr(benchmark, "peak_of_processes_mib", lambda: next(peaks_mib))
    parts = ("affinity", "changes", "kills")
    report = run(load_recipe("tiny"), parts, sessions=8, changes=2, kills=1)
    assert_nothing_lost(report.changes, 2)
    assert report.changes is not None and report.changes.moved <= 0.05 * report.changes.judged
    assert_nothing_lost(report.kills, 1)
    assert report.versions_seen is not None and report.affinity is not None
    assert (report.versions_seen.mixed, report.versions_seen.late) == (0, 0)
    assert report.affinity.kept >= 0.95 and report.affinity.replicas == 2
    assert report.affinity.second_tokens < report.affinity.second_anew_tokens
    assert report.peak_memory_mib == 2e6
    path = tmp_path / "cluster_bench.json"
    report.save(path)
    assert ClusterReport.load(path) == report
    text = table(report)
    assert "1 replicas killed" in text and "of two versions" in text
