"""Bases beside each other have equal parts of a GPU; a benchmark goes on with scores only."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from serve.bench import engines
from serve.bench.engines import judged, memory_beside, scores_of, scores_of_calls
from serve.engine import Call, Check, Refusal, Score

SCORE = Score(0.5, 0, 10, 1.0)


@pytest.mark.parametrize("bases", [1, 2, 5])
def test_the_parts_of_all_bases_are_what_vllm_takes_of_a_gpu_by_itself(
    bases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "installed_device", lambda: "cuda")
    (share,) = memory_beside(bases).values()
    assert memory_beside(bases) == {"gpu_memory_utilization": share}
    assert bases * share == pytest.approx(0.92)
    monkeypatch.setattr(engines, "installed_device", lambda: "cpu")
    assert memory_beside(bases) == {}


def test_scores_come_through_in_order_and_a_refusal_is_an_error() -> None:
    second = Score(1.5, 0, 10, 1.0)
    assert scores_of([SCORE, SCORE], where="here") == [SCORE, SCORE]
    assert scores_of_calls([Call([SCORE]), Call([second, SCORE])], "here") == [SCORE, second, SCORE]
    whole = Check((), {}, cached_tokens=0, computed_tokens=10, wall_ms=1.0)
    assert judged(whole, "here") is whole
    refusal = Refusal("rule", "no", "nan")
    refused = r"here: a benchmark request was refused \(got rule: no\)"
    with pytest.raises(GuardError, match=refused):
        scores_of([SCORE, refusal], where="here")
    with pytest.raises(GuardError, match=refused):
        judged(Check((), {"rule": refusal}, 0, 10, 1.0), "here")
