"""Open-loop traffic on a real server around a toy engine."""

from __future__ import annotations

from tqdm import tqdm

from guard.recipe import load_recipe
from serve.api.app import create_app
from serve.bench.http.server import rule_names
from serve.bench.http.traffic import AT_ONCE, OpenLoopTraffic
from serve.bench.load import RULES
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
