from __future__ import annotations

from guard.recipe import load_recipe
from serve.bench.planning.bursts import LONGEST, MOST_TOKENS, draw_bursts, scaffold_tokens
from tests.serve.cards import prompts


def test_bursts_are_of_all_sizes_and_not_too_large() -> None:
    for shares in (True, False):
        drawn = draw_bursts(60, 64, seed=1, shares=shares)
        assert drawn == draw_bursts(60, 64, seed=1, shares=shares)
        for plan in drawn:
            tokens = [tokens * (1 if shares else rules) for tokens, rules in plan.checks]
            assert sum(tokens) <= MOST_TOKENS[shares] + LONGEST
        sizes = {len(plan.checks) for plan in drawn}
        assert 1 in sizes and max(sizes) >= 3
        assert max(rules for plan in drawn for _, rules in plan.checks) > 30


def test_all_conversations_begin_with_the_same_whole_blocks() -> None:
    assert load_recipe("tiny").engine["block_size"] == 32
    held = scaffold_tokens(prompts(), 8)
    assert held % 8 == 0 and 0 < held < 64
    assert scaffold_tokens(prompts(), 4096) == 0
