"""A load that rises and falls, put to replicas without a model on a Ray of this file's own."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.api.app import create_app
from serve.bench.cluster import autoscaling
from serve.bench.cluster.autoscaling import FEW, MANY, SETTLING, measure_autoscaling
from serve.bench.cluster.load import expected_of
from serve.bench.cluster.servers import served_words
from serve.bench.cluster.words import SLOWLY, VIOLATES
from serve.cluster.size import ReplicaRange, ScalingPace
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

STEADY_S = 2.0
# A second replica starts when the first has been measured, which a busy machine may take long for.
SOON = ScalingPace(every_s=0.5, look_back_s=2.0, up_s=15.0, down_s=1.0)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_second_replica_comes_with_the_load_and_goes_with_it_and_no_check_is_lost() -> None:
    texts = [[Message("user", f"{SLOWLY} {VIOLATES} {number}")] for number in range(24)]
    with served_words(2, ReplicaRange(1, 2, SOON)) as server:
        checks = expected_of(server.client, texts, server.rules)
        scaled = measure_autoscaling(server.client, checks, steady_s=STEADY_S)
    assert (scaled.lost, scaled.false_allows, scaled.contradicted) == (0, 0, 0)
    before, risen, scaled_up = scaled.windows
    assert (before.senders, risen.senders, scaled_up.senders) == (FEW, MANY, MANY)
    assert scaled.judged > scaled_up.per_s * scaled_up.seconds > 0
    assert 0 < scaled.second_s < 120 and 0 < scaled.down_s < 120
    assert min(before.per_s, risen.per_s) > 0
    assert risen.seconds == pytest.approx(STEADY_S) and scaled.second_s > STEADY_S


def test_the_first_replica_is_measured_before_a_second_one_starts() -> None:
    assert ScalingPace.up_s > (1 + SETTLING) * autoscaling.STEADY_S


def test_a_second_replica_that_comes_while_the_first_is_measured_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ToyEngine({"fine": -2.0})
    monkeypatch.setattr(autoscaling, "replica_processes", lambda: [1, 2])
    monkeypatch.setattr(autoscaling, "SECOND_S", 0.1)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        checks = expected_of(client, [[Message("user", "Hello.")]], ["fine"])
        with pytest.raises(GuardError, match="a second replica came too soon"):
            measure_autoscaling(client, checks, steady_s=0.1)
