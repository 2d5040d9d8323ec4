"""A gate takes back what exceeds a limit, and hardly ever what keeps to all of them."""

from __future__ import annotations

import random

import pytest

from guard.rule import Gate
from serve.registry.gate import TrialGate

ALL = Gate(most_disagreement=0.1, most_flagged=1.5, most_unjudged=0.05, slower_than=1.0)
CHECKS = 3_000


def checks_to_abort(
    seed: int,
    *,
    flagged: float = 0.2,
    disagreeing: float = 0.02,
    unjudged: float = 0.01,
    slow: float = 0.01,
) -> int | None:
    """After how many checks a version is taken back that flags so many conversations, of which the
    champion flags a fifth.
    """
    draw, gate = random.Random(seed), TrialGate(ALL)
    for check in range(1, CHECKS + 1):
        point = draw.random()
        champion, trial = point < 0.2, point < flagged
        if draw.random() < disagreeing:
            trial = not trial
        said = None if draw.random() < unjudged else trial
        if gate.saw(str(check), champion, said, 2.0 if draw.random() < slow else 0.1):
            return check
    return None


def test_a_version_that_keeps_to_all_limits_is_hardly_ever_taken_back() -> None:
    aborted = [seed for seed in range(200) if checks_to_abort(seed)]
    assert len(aborted) <= 10


@pytest.mark.parametrize(
    ("fault", "within"),
    [
        ({"flagged": 0.4}, 900),
        ({"disagreeing": 0.3}, 300),
        ({"unjudged": 0.2}, 300),
        ({"slow": 0.3}, 300),
    ],
)
def test_a_version_that_exceeds_one_is_taken_back(fault: dict[str, float], within: int) -> None:
    for seed in range(30):
        assert (checks_to_abort(seed, **fault) or CHECKS) <= within


def test_it_says_why_and_not_before_it_has_seen_enough() -> None:
    gate = TrialGate(Gate(least_checks=30))
    reasons = [gate.saw(str(number), False, True, 0.1) for number in range(40)]
    assert reasons[:29] == [None] * 29
    assert reasons[29] == "it flagged 30 of 30 conversations, the champion 0; 1.5 times may be"
    late = TrialGate(Gate(least_checks=5_000))  # however sure it is by then
    assert [late.saw(str(number), True, None, 9.0) for number in range(5_000)][-1]


def test_what_the_champion_cannot_judge_says_nothing_of_the_trial() -> None:
    gate = TrialGate(ALL)
    assert {gate.saw(str(number), None, None, 9.0) for number in range(1_000)} == {None}


def test_a_conversation_counts_once_however_often_it_is_asked() -> None:
    """The checks of one stream, or of a user who repeats himself, are one draw."""
    gate = TrialGate(ALL)
    assert {gate.saw("the same", False, True, 9.0) for _ in range(1_000)} == {None}


def test_what_a_conversation_shows_later_counts_too() -> None:
    """Most violations are not in the first turn, nor in the first words of a reply."""
    gate = TrialGate(Gate(most_flagged=1.5))
    for turn in range(3):
        said = [gate.saw(str(number), False, turn == 2, 0.1) for number in range(100)]
    assert said[-1] == "it flagged 100 of 100 conversations, the champion 0; 1.5 times may be"


def test_a_window_forgets_what_was_before_it() -> None:
    """Or a version that was good for a month would be bad for another one, unnoticed."""
    late = {}
    for window in (1_000, 100_000):
        gate = TrialGate(Gate(window=window))
        for number in range(20_000):
            gate.saw(str(number), True, True, 0.1)
        late[window] = next(n for n in range(50_000) if gate.saw(f"bad {n}", False, True, 0.1))
    assert late[1_000] < 60 < late[100_000]


def test_limits_that_could_never_be_reached_are_refused() -> None:
    with pytest.raises(ValueError, match="least_checks should be at most window"):
        Gate(least_checks=200, window=100)
