"""Open-loop traffic on a real server around a toy engine."""

from __future__ import annotations

import pytest
from tqdm import tqdm

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.api.app import create_app
from serve.bench.http.server import rule_names
from serve.bench.http.traffic import AT_ONCE, OpenLoopTraffic, steady_rate
from serve.bench.workload.arrivals import RULES
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine


def test_new_conversations_arrive_at_the_rate_and_saturate_when_they_come_at_once() -> None:
    engine = ToyEngine(dict.fromkeys(rule_names(RULES[1]), -2.0))
    with serving(create_app(engine)) as client, tqdm(disable=True) as bar:  # type: ignore[arg-type]
        traffic = OpenLoopTraffic(load_recipe("tiny"), str(client.base_url), bar)
        run, due_s = traffic.run(100.0, 10, seed=3, deadline_s=5.0)
        assert len(due_s) == run.count(200) == 10
        assert run.wall_s >= due_s[-1] > 0
        assert traffic.saturation() > AT_ONCE / 60


def test_the_rate_is_that_of_the_middle_where_as_many_checks_are_under_way_all_the_time() -> None:
    slow_start, steady = [9.0, 9.5, 10.0], [10.0 + 0.1 * number for number in range(1, 7)]
    assert steady_rate([*slow_start, *steady, 13.0, 18.0, 20.0][::-1]) == pytest.approx(10)
    with pytest.raises(GuardError, match="hardly any check was answered"):
        steady_rate([1.0, 2.0, 3.0])
