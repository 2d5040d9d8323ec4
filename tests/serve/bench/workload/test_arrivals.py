"""Conversations of real lengths that arrive by a Poisson process."""

from __future__ import annotations

import numpy as np
import pytest

from guard.conversation.example import Message
from serve.bench.workload.arrivals import LENGTHS, RULES, arrivals
from tests.serve.cards import prompts


def test_conversations_have_real_lengths_and_a_few_rules_each() -> None:
    drawn = arrivals(prompts(), 5.0, 200, seed=3)
    lengths = sorted(len(prompts().prefix_ids(arrival.messages)) for arrival in drawn)
    assert lengths[0] >= LENGTHS[0] - 5 and lengths[-1] <= LENGTHS[-1] + 5
    assert np.median(lengths) == pytest.approx(LENGTHS[10], rel=0.1)
    assert {len(arrival.rules) for arrival in drawn} == set(range(RULES[0], RULES[1] + 1))
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in drawn)
    assert drawn[-1].due_s == pytest.approx(40, rel=0.3)
    assert drawn == arrivals(prompts(), 5.0, 200, seed=3) != arrivals(prompts(), 5.0, 200, seed=4)


def test_no_two_runs_have_a_conversation_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(_: object, __: int, seed: int) -> tuple[Message, ...]:
        return (Message("user", f"conversation {seed}"),)

    monkeypatch.setattr("serve.bench.workload.arrivals.conversation", named)
    runs = [arrivals(prompts(), 5.0, 1200, seed) for seed in (0, 1, 2)]
    assert len({arrival.messages for run in runs for arrival in run}) == 3 * 1200
