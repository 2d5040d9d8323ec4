"""The counts of the benchmark, and their table. Knows nothing of vLLM."""

from __future__ import annotations

from typing import Any

from guard.files.yaml_file import Strict
from guard.rule import RuleTurn
from serve.bench.report import BenchReport


class Settings(Strict):
    """The work of one process: cells of (conversation's tokens, rules), in one engine.

    `largest_graph`: a step with more tokens than this is shared by the rules that begin with the
    partial block that the step completes. None: rules wait for that step.
    """

    cells: list[tuple[int, int]]
    rule_turn: RuleTurn
    largest_graph: int | None
    engine: dict[str, Any]  # vLLM's EngineArgs


class CountedStep(Strict):
    """The work of a step, and the launches of its low-rank products in all layers of Qwen3-4B.

    `programs`: those that the plugin launches. `programs_of_vllm`: those that vLLM asks for.
    `waits`: how often the host waits for the device while the plugin prepares the launches.
    `waits_of_vllm`: how often it would wait for vLLM's own code.
    """

    tokens: int
    requests: int
    launches: int
    programs: int
    programs_of_vllm: int
    waits: int
    waits_of_vllm: int


class StepCounts(Strict):
    """The steps of a new conversation, and of the same one again, for each cell."""

    checks: list[tuple[list[CountedStep], list[CountedStep]]]


class CountedCheck(Strict):
    """A check before and after the plugin's changes.

    `before`: vLLM's grid and default step; rules wait for their conversation's partial block.
    `after`: the plugin's grid and the recipe's step, which the rules share.
    """

    tokens: int
    rules: int
    is_known: bool  # whether the conversation is in the cache
    before: list[CountedStep]
    after: list[CountedStep]


class GpuCountsReport(BenchReport):
    """Everything in `runs/gpu_counts_bench.json`."""

    recipe_engine: dict[str, Any]  # the recipe's sizes of a step
    default_engine: dict[str, Any]  # vLLM's sizes of a step
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
