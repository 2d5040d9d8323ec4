"""Tricks write both labels the same way, and keep what is held out out of training."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest

from data.generator.generate import Counts, generate
from data.generator.phrasebook import pool_of
from data.generator.tricks import INSTRUCTIONS, MASTER_KEYS, TRICKS
from guard.conversation.example import Example
from tests.data.generator.corpora import corpus_of

TEXT = "You will have the whole amount back on your card before the weekend."


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_changes_the_writing_and_repeats_itself_for_a_seed(name: str) -> None:
    changed = [TRICKS[name](TEXT, random.Random(seed), "seen") for seed in (*range(10), 0)]
    assert TEXT not in changed and changed[0] == changed[-1]
    assert len(set(changed)) > 1


@pytest.mark.parametrize("name", ["instruction", "master_key", "hidden_tags"])
def test_words_to_the_judge_that_are_held_out_never_stand_in_training(name: str) -> None:
    of = MASTER_KEYS if name == "master_key" else INSTRUCTIONS
    for pool in ("seen", "unseen"):
        for seed in range(60):
            changed = TRICKS[name](TEXT, random.Random(seed), pool)  # type: ignore[arg-type]
            tags = {
                ord(c): chr(ord(c) - 0xE0000) for c in changed if unicodedata.category(c) == "Cf"
            }
            added = changed.translate(tags).replace(TEXT, "").strip()
            assert added in pool_of(of, pool)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows_of() -> dict[str, list[Example]]:
    """Rows of a rule about commands, and of another one."""
    names = ("jailbreak_attempt", "refund_promise")
    return {name: generate(corpus_of(name, names), Counts(800, 20, 20), 0) for name in names}


@pytest.mark.slow
def test_a_share_of_the_pairs_is_tricked_in_the_same_turn(
    rows_of: dict[str, list[Example]],
) -> None:
    for rows in rows_of.values():
        tricked = [row for row in rows if row.meta["trick"]]
        assert 0.08 < len(tricked) / len(rows) < 0.24
        assert sum(row.label for row in tricked) * 2 == len(tricked)
        assert {row.meta["difficulty"] for row in tricked} == {"adversarial"}
        assert {row.meta["difficulty"] for row in rows} == {"easy", "boundary", "adversarial"}
        places = [_full_width(row) for row in tricked if row.meta["trick"] == "full_width"]
        assert places and all(len(place) == 1 for place in places)
        assert places[::2] == places[1::2]


def _full_width(row: Example) -> list[int]:
    """The numbers of the turns with full-width letters."""
    turns = enumerate(row.messages)
    return [number for number, turn in turns if re.search("[\uff21-\uff5a]", turn.content)]


@pytest.mark.slow
def test_a_rule_about_commands_gets_no_notes_to_the_judge(
    rows_of: dict[str, list[Example]],
) -> None:
    used = {name: {row.meta["trick"] for row in rows} for name, rows in rows_of.items()}
    assert used["refund_promise"] == {None, *TRICKS}
    assert used["jailbreak_attempt"] == {None, *TRICKS} - {"instruction", "hidden_tags"}
