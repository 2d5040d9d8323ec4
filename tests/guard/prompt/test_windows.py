"""Every token is in a window and in one span, no turn that fits is cut, and which turns count."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from guard.conversation.example import ROLES
from guard.prompt.windows import SILENT, UNKNOWN, counting, cut_spans, cut_windows, judged_of
from guard.rule import SPEAKERS, Reads

CLS, SEP = 101, 102


def flat(*lengths: int) -> list[int]:
    """Turns of so many tokens, the separator included; a turn's tokens are its number."""
    ids: list[int] = []
    for number, length in enumerate(lengths, start=1000):
        ids += [number] * (length - 1) + [SEP]
    return ids


def ids_of(*lengths: int, limit: int) -> list[tuple[int, ...]]:
    """The token ids of the windows over turns of so many tokens."""
    return [window.token_ids for window in cut_windows(flat(*lengths), (CLS,), SEP, limit)]


def test_a_window_begins_with_the_last_turns_of_the_one_before_it_and_turns_are_cut_evenly() -> (
    None
):
    assert ids_of(3, 5, limit=9) == [(CLS, *flat(3, 5))]
    first, second = ids_of(20, 5, 5, 30, limit=41)
    assert first == (CLS, *flat(20, 5, 5))
    assert second == (CLS, *flat(20, 5, 5, 30)[20:])  # 10 of at most 10 repeated tokens
    # A conversation that grows keeps the windows that are full.
    before = ids_of(*[10] * 9, limit=32)
    after = ids_of(*[10] * 12, limit=32)
    assert after[: len(before) - 1] == before[:-1]
    (window,) = cut_windows(flat(4, 11, 3), (CLS,), SEP, limit=99)
    spans = cut_spans(window, limit=4)
    assert spans[0] == (1, 5, UNKNOWN, 0)
    assert [span.end - span.start for span in spans] == [4, 3, 4, 4, 3]


@pytest.mark.parametrize("lengths", [(7, 9, 30, 4, 4, 12), (100,), (2, 100, 2), (31,) * 5, (63, 2)])
def test_every_token_is_read_and_no_turn_that_fits_is_cut(lengths: tuple[int, ...]) -> None:
    limit = 32
    read = ids_of(*lengths, limit=limit)
    assert all(len(window) <= limit and window[0] == CLS for window in read)
    for number, length in enumerate(lengths, start=1000):
        parts = [window for window in read if number in window]
        if length < limit:
            assert any(window.count(number) == length - 1 for window in parts)
        else:
            assert sum(window.count(number) for window in parts) >= length - 1
            assert SEP in parts[-1]


@pytest.mark.parametrize("limit", [1, 2, 5, 24])
def test_every_token_behind_the_start_is_in_one_span_and_no_span_holds_two_turns(
    limit: int,
) -> None:
    for one in cut_windows(flat(1, 30, 24, 25, 2, 90), (CLS,), SEP, limit=64):
        cut = cut_spans(one, limit)
        assert cut[0].start == 1 and cut[-1].end == len(one.token_ids)
        assert all(before.end == after.start for before, after in itertools.pairwise(cut))
        for start, end, *_ in cut:
            assert 0 < end - start <= limit
            assert SEP not in one.token_ids[start : end - 1]


TALK = ["user", "assistant", "user", "assistant"]
COUNTED: list[tuple[list[str], Reads, list[int]]] = [
    (["user", SILENT], "assistant", [0]),
    ([SILENT, SILENT], "assistant", [0, 1]),
    (["user", SILENT, "assistant"], "assistant", [2]),
    (TALK, "last user", [2]),
    (TALK, "last tool", [3]),  # nobody is judged: the last of everything
    (["user", SILENT], "last assistant", [0]),
]


def test_who_and_which_turns_count_follows_from_whom_a_rule_judges() -> None:
    assert list(SPEAKERS) == list(get_args(Reads))
    assert set(itertools.chain(*SPEAKERS.values())) <= set(ROLES)
    assert judged_of(["user", UNKNOWN, SILENT, "system"], "tool") == [1, 3]
    for speakers, reads, counted in COUNTED:
        assert counting(speakers, reads) == counted
    assert counting(["user", "user", "assistant"], "last user", [0, 0, 1]) == [0, 1]  # two spans
