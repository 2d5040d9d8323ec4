"""Flips in each direction, exact intervals, and the largest changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serve.scan.flips import CountedShare, ReplayTally

Pair = tuple[float | None, float | None]


def row(number: int, p: float | None, *, confident: bool = True) -> dict[str, Any]:
    place = {"source": "a.jsonl", "row": number, "id": f"c{number}", "p_violation": p}
    if p is None:
        return {**place, "verdict": "unjudged", "confident": None, "reason": "it does not fit"}
    verdict = "violation" if p >= 0.5 else "allow"
    return {**place, "verdict": verdict, "confident": confident, "reason": ""}


def tallied(pairs: list[Pair], shown: int = 50) -> ReplayTally:
    tally = ReplayTally(shown)
    for number, (a, b) in enumerate(pairs):
        tally.add(row(number, a), row(number, b))
    return tally


def test_each_direction_and_each_side_is_counted() -> None:
    pairs: list[Pair] = [(0.1, 0.2), (0.1, 0.9), (0.4, 0.6), (0.7, 0.3), (0.8, 0.9)]
    pairs += [(None, 0.9), (0.1, None), (None, None)]
    tally = tallied(pairs)
    facts = tally.facts()
    assert facts["judged"] == 5
    counts = {name: facts[name]["count"] for name in ("to_violation", "to_allow", "flips")}
    assert counts == {"to_violation": 2, "to_allow": 1, "flips": 3}
    assert (facts["flagged_a"]["count"], facts["flagged_b"]["count"]) == (2, 3)
    assert [facts[f"unjudged_{side}"] for side in ("a", "b", "a_and_b")] == [1, 1, 1]
    assert facts["reasons"] == {"it does not fit": 3}
    assert [flip["row"] for flip in facts["flipped"]] == [1, 3, 2]
    assert tally.largest()[1].change == pytest.approx(-0.4)
    assert list(facts["quantiles"].values())[::2] == pytest.approx([-0.4, 0.1, 0.8])
    assert facts["confident_flips"] == 3
    tally.add(row(9, 0.1), row(9, 0.6, confident=False))
    assert tally.facts()["confident_flips"] == 3, "either is in doubt"
    text = tallied(pairs).as_text()
    assert (text["judged by both"], text["unjudged by A only"]) == ("5", "1")
    assert text["verdicts that flip"].startswith("3 (60.00 %, 95 % interval ")
    assert "least -0.400" in text["p(B) - p(A)"] and "most +0.800" in text["p(B) - p(A)"]
    assert text["unjudged: it does not fit"] == "3"


def test_the_interval_is_exact_and_of_nothing_says_nothing() -> None:
    assert str(CountedShare.of(3, 2000)) == "3 (0.15 %, 95 % interval 0.03 to 0.44)"
    assert CountedShare.of(0, 0).ci95 == (0.0, 1.0)
    nothing = tallied([(None, None)])
    assert nothing.facts()["quantiles"] == {} and "p(B) - p(A)" not in nothing.as_text()


def test_the_list_is_bounded_and_keeps_the_largest() -> None:
    changes = np.random.default_rng(0).uniform(0.1, 0.5, 300)
    tally = tallied([(0.45, 0.45 + change) for change in changes], shown=7)
    expected = np.argsort(-changes)[:7].tolist()
    assert [flip.row for flip in tally.largest()] == expected
    assert tally.counts["flips"] == sum(changes >= 0.05) and len(tally.flips) <= 14
