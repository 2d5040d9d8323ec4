"""The benchmark of replicas, small."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench.cluster import run as benchmark
from serve.bench.cluster.measure import check_told_apart
from serve.bench.cluster.report import ClusterReport, ShardCost, UnderFault, table
from serve.bench.cluster.run import ClusterBench, arguments, main
from serve.bench.report import Spread

EVENTS = {"changes": 2, "kills": 1, "engine_kills": 1}


def assert_nothing_lost(fault: UnderFault | None, events: int) -> None:
    assert fault is not None and fault.events == events and fault.judged > 0
    assert (fault.lost, fault.false_allows, fault.contradicted) == (0, 0, 0)


def test_versions_that_score_texts_alike_tell_nothing_of_each_other() -> None:
    first = [0.1] * 16
    check_told_apart(first, [*first[:12], 0.2, 0.2, 0.9, 0.0])
    with pytest.raises(GuardError, match="two versions of a rule say nearly the same"):
        check_told_apart(first, [*first[:13], 0.2, 0.9, 0.0])


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_the_same_rules_on_two_shards_compute_the_conversation_twice() -> None:
    bench = ClusterBench(load_recipe("tiny"), repeats=2, sessions=8, events=EVENTS)
    bench.measure(("shards",))
    report = bench.report
    assert report.shards is not None
    one, two = report.shards
    assert (one.shards, two.shards) == (1, 2)
    assert two.first_tokens == pytest.approx(one.first_tokens + one.tokens, abs=100)
    assert two.again_tokens == pytest.approx(one.again_tokens, abs=100)
    assert "2 shards, 20 rules x 1,000 tokens" in table(report)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_killed_replicas_and_changed_rules_lose_no_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks_mib = iter((1e6, 2e6))  # of the parts' processes
    monkeypatch.setattr(benchmark, "peak_of_processes_mib", lambda: next(peaks_mib))
    # Sessions are placed by hashes of random identifiers: 8 fall on one replica in 1 run of 100.
    bench = ClusterBench(load_recipe("tiny"), repeats=2, sessions=32, events=EVENTS)
    bench.measure(("affinity", "changes", "kills"))
    report = bench.report
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


def options(parts: str, runs: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments(parser)
    parsed = parser.parse_args(["--parts", parts])
    parsed.model, parsed.runs = "tiny", runs
    return parsed


def fail(*_: object) -> None:
    raise GuardError("no second replica has judged")


def test_a_part_that_fails_does_not_lose_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = Spread.of([1.0])
    shard_cost = ShardCost(
        shards=1,
        rules=20,
        tokens=1000,
        first_ms=took,
        again_ms=took,
        first_tokens=1060,
        again_tokens=60,
    )

    monkeypatch.setattr(benchmark, "_shards", lambda *_: [shard_cost])
    monkeypatch.setattr(benchmark, "_autoscaling", fail)
    with pytest.raises(GuardError, match="no second replica"):
        main(options("shards,autoscaling", tmp_path))
    report = ClusterReport.load(tmp_path / "cluster_bench.json")
    assert report.shards == [shard_cost] and report.autoscaling is None


def test_without_a_part_that_was_measured_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_autoscaling", fail)
    with pytest.raises(GuardError, match="no second replica"):
        main(options("autoscaling", tmp_path))
    assert list(tmp_path.iterdir()) == []
