"""Flips in each direction, exact intervals, and the largest changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from serve.replay.summary import CountedShare, ReplayTally


def row(number: int, p: float | None, *, confident: bool = True) -> dict[str, Any]:
    verdict = "unjudged" if p is None else ("violation" if p >= 0.5 else "allow")
    reason = "it does not fit" if p is None else ""
    return {
        "source": "a.jsonl",
        "row": number,
        "id": f"c{number}",
        "verdict": verdict,
        "p_violation": p,
        "confident": None if p is None else confident,
        "reason": reason,
    }


def tallied(pairs: list[tuple[float | None, float | None]], shown: int = 50) -> ReplayTally:
    tally = ReplayTally("mild", shown)
    for number, (a, b) in enumerate(pairs):
        tally.add(row(number, a), row(number, b))
    return tally


def test_each_direction_and_each_side_is_counted() -> None:
    pairs: list[tuple[float | None, float | None]] = [
        (0.1, 0.2),
        (0.1, 0.9),
        (0.4, 0.6),
        (0.7, 0.3),
        (0.8, 0.9),
        (None, 0.9),
        (0.1, None),
        (None, None),
    ]
    replay = tallied(pairs).result()
    assert (replay.conversations, replay.judged) == (8, 5)
    counts = (replay.to_violation.count, replay.to_allow.count, replay.flips.count)
    assert counts == (2, 1, 3)
    assert (replay.flagged_a.count, replay.flagged_b.count) == (2, 3)
    unjudged = (replay.unjudged_a_only, replay.unjudged_b_only, replay.unjudged_both)
    assert unjudged == (1, 1, 1)
    assert replay.reasons == {"it does not fit": 3}
    assert [flip.row for flip in replay.flipped] == [1, 3, 2]
    assert [changed.row for changed in replay.largest] == [1, 3, 2, 0, 4]
    assert replay.flipped[1].change == pytest.approx(-0.4)
    assert replay.quantiles is not None
    assert replay.quantiles["0.5"] == pytest.approx(0.1)
    assert (replay.quantiles["0"], replay.quantiles["1"]) == pytest.approx((-0.4, 0.8))


def test_a_flip_of_which_either_is_in_doubt_is_not_a_confident_one() -> None:
    tally = ReplayTally("mild", 5)
    tally.add(row(0, 0.1), row(0, 0.9))
    tally.add(row(1, 0.1), row(1, 0.6, confident=False))
    assert tally.result().confident_flips == 1


def test_the_interval_is_exact() -> None:
    share = CountedShare.of(3, 200)
    expected = (beta.ppf(0.025, 3, 198), beta.ppf(0.975, 4, 197))
    assert share.ci95 == pytest.approx(expected) and share.share == 0.015
    assert CountedShare.of(0, 0).ci95 == (0.0, 1.0)


def test_lists_are_bounded_and_keep_the_largest() -> None:
    changes = np.random.default_rng(0).uniform(-0.4, 0.4, 300)
    pairs: list[tuple[float | None, float | None]] = [(0.45, 0.45 + change) for change in changes]
    replay = tallied(pairs, shown=7).result()
    expected = np.argsort(-np.abs(changes))[:7].tolist()
    assert [changed.row for changed in replay.largest] == expected
    assert len(replay.flipped) == 7 and replay.flips.count > 7


def test_probabilities_are_those_of_the_judged() -> None:
    probabilities = tallied([(0.1, 0.9), (None, 0.2), (0.3, 0.4)]).probabilities
    assert probabilities.a.tolist() == [0.1, 0.3] and probabilities.b.tolist() == [0.9, 0.4]
    assert probabilities.flips.tolist() == [True, False]


def test_nothing_judged_is_no_quantile() -> None:
    replay = tallied([(None, None)]).result()
    assert replay.quantiles is None and replay.flips.count == 0
