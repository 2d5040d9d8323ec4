"""The counts of a small fan-out, by the real engine in a process of its own."""

from __future__ import annotations

import math

import pytest

from guard.machine.device import installed_device
from guard.recipe import load_recipe
from serve.bench.gpu_counts.report import GpuCountsReport
from serve.bench.gpu_counts.run import run
from serve.bench.gpu_counts.shape import LAYERS, PACKED_LAYERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        installed_device() != "cpu", reason="interpreted kernels: a CPU environment"
    ),
]

RULES, SLOTS, RANK = 3, 128, 32
# Of tokens and of prompts each: the flag "no adapter" copied to the host, the same flag read, and
# the number of different adapters.
WAITS_OF_VLLM = 2 * 3
# vLLM's default tiles, and its cuts of the sum for fewer than 128 tokens and for more.
TILE_TOKENS, TILE_RANK = 32, 16
SPLIT_K = {True: 64, False: 8}
EXPAND_TOKENS = 64
EXPAND_WIDTH = {True: 64, False: 128}  # of packed projections, and of a single one


def programs(tokens: int, longest: int, ids: int) -> int:
    """Programs of one layer for a step of so many tokens, by vLLM's formula, over tiles that the
    adapter with most tokens fills.
    """
    total = 0
    for layer in PACKED_LAYERS:
        slices, widest = len(layer.writes), max(layer.writes)
        tiles = math.ceil(longest / TILE_TOKENS) * math.ceil(RANK / TILE_RANK)
        total += SPLIT_K[tokens < 128] * tiles * slices * ids
        wide = math.ceil(longest / EXPAND_TOKENS) * math.ceil(widest / EXPAND_WIDTH[slices > 1])
        total += wide * slices * ids
    return total


@pytest.fixture(scope="module")
def report() -> GpuCountsReport:
    """A conversation of 600 tokens is more than a graph has; one of 150 is not, its rules wait."""
    return run(load_recipe("qwen3-4b"), cells=[(600, RULES), (150, RULES)])


def test_rules_go_in_a_large_step_and_only_programs_with_work_are_launched(
    report: GpuCountsReport,
) -> None:
    assert report.captured_tokens == 512
    large, large_known, small, small_known = report.checks
    assert [check.is_known for check in report.checks] == [False, True] * 2
    assert [step.requests for step in large.before] == [1, RULES - 1]
    assert [step.requests for step in large.after] == [RULES]
    assert [step.requests for step in small.after] == [1, RULES - 1]
    assert [step.requests for step in large_known.after] == [RULES]
    assert [step.requests for step in small_known.after] == [RULES]
    suffix = small.after[1].tokens // (RULES - 1)
    assert 140 < small.after[0].tokens - suffix < 160
    assert 590 < large.after[0].tokens - RULES * suffix < 610
    for step in (*large.after, *small.after):
        assert step.launches == 2 * len(PACKED_LAYERS) * LAYERS
        ids = step.requests + (step is not small.after[1])  # with the tokens of no adapter
        assert step.programs == LAYERS * programs(step.tokens, suffix, ids)
        assert step.programs_of_vllm == LAYERS * programs(step.tokens, step.tokens, SLOTS + 1)


def test_vllm_would_wait_six_times_in_a_step_of_adapters(report: GpuCountsReport) -> None:
    for check in report.checks:
        for step in (*check.before, *check.after):
            assert step.waits_of_vllm == WAITS_OF_VLLM


def test_the_plugin_waits_for_nothing(report: GpuCountsReport) -> None:
    for check in report.checks:
        for step in (*check.before, *check.after):
            assert step.waits == 0
