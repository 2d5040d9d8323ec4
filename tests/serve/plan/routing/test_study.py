from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.plan.deployment import deploy
from serve.plan.routing import study as module
from serve.plan.routing.report import RoutingReport
from serve.plan.routing.study import service_of, study
from serve.plan.traffic.generate import TrafficShape
from tests.serve.plan.deployments import calibrated, plan

TRAFFIC = {"rate": 10.0, "lengths": [97, 97], "rules_a_check": [2, 2], "rules": 4}


def test_a_checks_service_is_what_its_work_costs(tmp_path: Path) -> None:
    calibrated(tmp_path)
    alora, lora = deploy(plan(traffic=TRAFFIC), tmp_path).methods
    assert service_of(alora)(100, 40, 2) == pytest.approx((60 + 2 * 3) / 1000)
    assert service_of(lora)(100, 40, 2) == pytest.approx(2 * (60 + 3) / 1000)


def test_so_many_replicas_are_at_work_for_the_share_that_the_lengths_say(tmp_path: Path) -> None:
    traffic = TRAFFIC | {"lengths": [100, 100, 1100], "rules_a_check": [1, 1]}
    calibrated(tmp_path)
    method = deploy(plan(traffic=traffic), tmp_path).methods[0]
    # Half are 100 tokens long and half 600 on average; a check of five sees 0.6 of that. With the
    # suffix of 3, and a millisecond a token, it takes 0.213 s.
    shape = TrafficShape((100, 100, 1100), (1, 1), 4)
    replicas = module._replicas_for(method, shape, conversations_an_hour=72_000, share=0.5)
    assert replicas == math.ceil(100 * 0.213 / 0.5)


def test_a_trace_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"not with a trace.*got checks.jsonl.*Leave the trace"):
        study(plan(traffic=TRAFFIC | {"trace": "checks.jsonl"}), tmp_path, 30, 3600)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoutingReport:
    calibrated(tmp_path)
    monkeypatch.setattr(module, "COUNTED_TURNS", 400)
    return study(plan(traffic=TRAFFIC), tmp_path, replicas=30, conversations_an_hour=3600)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_replica_refuses_from_as_many_checks_as_in_a_cluster() -> None:
    from serve.cluster import ray_pool

    assert module.MAX_ONGOING == ray_pool.MAX_ONGOING


def test_every_cell_is_simulated_with_both_routers(report: RoutingReport) -> None:
    cells = len(module.TURNS) * len(module.CHURN) + len(module.LOADS)
    assert len(report.rows) == 2 * cells
    ring, round_robin = report.rows[0], report.rows[1]
    assert ring.router == "consistent hash" and ring.affinity == 1.0
    assert round_robin.affinity < 0.2 and round_robin.hit_rate < ring.hit_rate
    assert "measured here" in report.source
    assert report.max_ongoing == module.MAX_ONGOING
