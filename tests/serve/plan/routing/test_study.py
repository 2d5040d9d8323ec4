from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from serve.plan.deployment import deploy
from serve.plan.routing import study as module
from serve.plan.routing.report import RoutingReport
from serve.plan.routing.study import service_of, study
from tests.serve.plan.deployments import calibrated, plan

TRAFFIC = {"rate": 10.0, "lengths": [97, 97], "rules_a_check": [2, 2], "rules": 4}


def test_a_checks_service_is_what_its_work_costs(tmp_path: Path) -> None:
    calibrated(tmp_path)
    alora, lora = deploy(plan(traffic=TRAFFIC), tmp_path).methods
    assert service_of(alora)(100, 40, 2) == pytest.approx((60 + 2 * 3) / 1000)
    assert service_of(lora)(100, 40, 2) == pytest.approx(2 * (60 + 3) / 1000)


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
