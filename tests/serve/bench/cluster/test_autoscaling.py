"""A load that rises and falls, put to replicas without a model on a Ray of this file's own."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from guard.example import Message
from serve.bench.cluster.autoscaling import FEW, MANY, autoscaled
from serve.bench.cluster.load import expected_of
from serve.bench.cluster.servers import served_words
from serve.bench.cluster.words import SLOWLY, VIOLATES
from serve.cluster.size import ReplicaRange, ScalingPace

AT_ONCE = ScalingPace(every_s=0.5, look_back_s=2.0, up_s=0.5, down_s=1.0)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_second_replica_comes_with_the_load_and_goes_with_it_and_no_check_is_lost() -> None:
    texts = [[Message("user", f"{SLOWLY} {VIOLATES} {number}")] for number in range(24)]
    with served_words(2, ReplicaRange(1, 2, AT_ONCE)) as server:
        checks = expected_of(server.client, texts, server.rules)
        scaled = autoscaled(server.client, checks, steady_s=2.0)
    assert (scaled.lost, scaled.false_allows, scaled.contradicted) == (0, 0, 0)
    before, risen, scaled_up = scaled.windows
    assert (before.senders, risen.senders, scaled_up.senders) == (FEW, MANY, MANY)
    assert scaled.judged > scaled_up.per_s * scaled_up.seconds > 0
    assert 0 < scaled.second_s < 120 and 0 < scaled.down_s < 120
    assert risen.per_s > before.per_s
