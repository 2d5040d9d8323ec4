"""What is counted, and the table of it. Knows nothing of vLLM."""

from __future__ import annotations

from typing import Any

from guard.files.yaml_file import Strict
from guard.rule import RuleTurn
from serve.bench.report import BenchReport


class Settings(Strict):
    """What one process counts: cells of (conversation's tokens, rules), in one engine.

    `largest_graph`: tokens that a step must exceed to be shared by those that begin with the
    partial block that it completes; None: they wait for it.
    """

    cells: list[tuple[int, int]]
    rule_turn: RuleTurn
    largest_graph: int | None
    engine: dict[str, Any]  # vLLM's EngineArgs


class CountedStep(Strict):
    """A step: what it computes, and what its low-rank products take, of all layers of Qwen3-4B.

    `programs` are the plugin's launches, `programs_of_vllm` what vLLM asks for. `waits`: how often
    the plugin makes the host wait for the device to prepare them, `waits_of_vllm` how often vLLM
    would.
    """

    tokens: int
    requests: int
    launches: int
    programs: int
    programs_of_vllm: int
    waits: int
    waits_of_vllm: int


class StepCounts(Strict):
    """By cell, the steps of a conversation that is new, and of the same one again."""

    checks: list[tuple[list[CountedStep], list[CountedStep]]]


class CountedCheck(Strict):
    """A check before and after: vLLM's grid with vLLM's default step, in which rules wait for their
    conversation's partial block; the plugin's grid with the recipe's step, which they share.
    """

    tokens: int
    rules: int
    is_known: bool  # whether the conversation is in the cache
    before: list[CountedStep]
    after: list[CountedStep]


class GpuCountsReport(BenchReport):
    """Everything in `runs/gpu_counts_bench.json`."""

    recipe_engine: dict[str, Any]  # of a step: the recipe's sizes
    default_engine: dict[str, Any]  # vLLM's
    rule_turn: RuleTurn
    captured_tokens: int  # the longest step that a captured graph computes
    checks: list[CountedCheck]


def table(report: GpuCountsReport) -> str:
    """The report as text."""
    lines = [
        "low-rank kernels at Qwen3-4B's shape, 36 layers; before: vLLM's grid and default step, "
        "rules wait; after: ours",
        f"{'tokens x rules':<16}{'':>8}{'':>8}{'steps':>7}{'computed':>10}{'launches':>10}"
        f"{'programs':>14}{'waits':>7}",
    ]
    for check in report.checks:
        name = f"{check.tokens:,} x {check.rules}"
        kind = "new"
        if check.is_known:
            kind = "known"
        before, after = check.before, check.after
        programs = sum(step.programs_of_vllm for step in before)
        waits = sum(step.waits_of_vllm for step in before)
        lines.append(_row(f"{name:<16}{kind:>8}{'before':>8}", before, programs, waits))
        programs = sum(step.programs for step in after)
        waits = sum(step.waits for step in after)
        lines.append(_row(f"{'':<16}{'':>8}{'after':>8}", after, programs, waits))
    lines.append(f"graphs are captured for steps of up to {report.captured_tokens} tokens")
    return "\n".join(lines)


def _row(head: str, steps: list[CountedStep], programs: int, waits: int) -> str:
    computed = sum(step.tokens for step in steps)
    launches = sum(step.launches for step in steps)
    return f"{head}{len(steps):>7}{computed:>10,}{launches:>10,}{programs:>14,}{waits:>7}"
