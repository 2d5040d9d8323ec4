"""Kleene's strong logic: a result that is known stays, whatever becomes known of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.policy.ruling import Ruling, all_of, any_of

ALLOW, UNJUDGED, VIOLATION = Ruling.ALLOW, Ruling.UNJUDGED, Ruling.VIOLATION
RULINGS = st.lists(st.sampled_from(Ruling), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("first", "second", "either", "both"),
    [
        (ALLOW, ALLOW, ALLOW, ALLOW),
        (ALLOW, UNJUDGED, UNJUDGED, ALLOW),
        (ALLOW, VIOLATION, VIOLATION, ALLOW),
        (UNJUDGED, UNJUDGED, UNJUDGED, UNJUDGED),
        (UNJUDGED, VIOLATION, VIOLATION, UNJUDGED),
        (VIOLATION, VIOLATION, VIOLATION, VIOLATION),
    ],
)
def test_the_truth_tables_are_kleene_s(
    first: Ruling, second: Ruling, either: Ruling, both: Ruling
) -> None:
    for pair in ((first, second), (second, first)):
        assert (any_of(pair), all_of(pair)) == (either, both)


def test_not_leaves_unjudged_what_is_and_turns_the_others() -> None:
    assert [one.opposite for one in Ruling] == [VIOLATION, UNJUDGED, ALLOW]


def completions(rulings: Sequence[Ruling]) -> Iterable[tuple[Ruling, ...]]:
    """Every way in which what is unjudged could turn out."""
    known = (ALLOW, VIOLATION)
    return product(*(known if one is UNJUDGED else (one,) for one in rulings))


@given(RULINGS)
def test_a_result_is_known_if_no_missing_verdict_changes_it(rulings: list[Ruling]) -> None:
    combine: Callable[[Iterable[Ruling]], Ruling]
    for combine in (any_of, all_of):
        possible = {combine(completed) for completed in completions(rulings)}
        expected = possible.pop() if len(possible) == 1 else UNJUDGED
        assert combine(rulings) is expected


@given(RULINGS)
def test_de_morgan(rulings: list[Ruling]) -> None:
    opposites = [one.opposite for one in rulings]
    assert all_of(opposites) is any_of(rulings).opposite


def test_of_nothing_there_is_no_judgement() -> None:
    for combine in (any_of, all_of):
        with pytest.raises(ValueError, match="empty"):
            combine([])
