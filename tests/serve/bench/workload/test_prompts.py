"""Conversations of a length, and wordings of a rule."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from serve.bench.workload.prompts import conversation, wordings
from tests.serve.cards import RULE_TEXTS, prompts


def test_a_conversation_has_the_length_that_was_asked_for_and_new_words() -> None:
    for tokens in (60, 100, 250, 1000):
        made = prompts().prefix_ids(conversation(prompts(), tokens, seed=1))
        assert abs(len(made) - tokens) <= 5
    first, second = (prompts().prefix_ids(conversation(prompts(), 500, seed)) for seed in (1, 2))
    end = len(prompts().prefix_ids([])) + 32  # a block
    assert first[:end] != second[:end]  # they share nothing but the head
    with pytest.raises(GuardError, match="length"):
        conversation(prompts(), 20, seed=1)


def test_as_many_distinct_wordings_as_rules_each_of_a_rule_s_length() -> None:
    texts = list(RULE_TEXTS.values())
    worded = wordings(texts, 100)
    assert len(set(worded)) == 100 and worded[: len(texts)] == texts
    lengths = {tuple(sorted(text.split())) for text in worded}
    assert lengths == {tuple(sorted(text.split())) for text in texts}
    assert wordings(texts, 2) == texts[:2]
    assert wordings([""], 3) == ["", "", ""]  # an adapter that reads nothing
    with pytest.raises(GuardError, match="too short for so many wordings"):
        wordings(["two words"], 3)
