"""The work of a GPU in a fan-out: steps, launches, programs and waits, counted without a GPU.

The steps are those of a real engine on vLLM's runner V2 with the recipe's sizes. The programs are
those of vLLM's own launch code for its low-rank kernels at the shape of Qwen3-4B. Before: as vLLM
does by itself, except that conversations are shared; rules wait for the step that completes their
conversation. After: they join that step if it is larger than every captured graph. The counts are
exact and the same on every machine. They are not times: only a GPU can tell what a program or a
launch costs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from guard.errors import GuardError
from guard.layout import ROOT
from guard.recipe import Recipe, load_recipe
from serve.bench.gpu_counts.report import (
    CountedCheck,
    GpuCountsReport,
    Settings,
    StepCounts,
    table,
)
from serve.bench.report import origin, publish

RECIPE = "qwen3-4b"  # its sizes of a step are used
CELLS = ((1000, 100), (5000, 100), (5000, 20))  # tokens of a conversation, rules
# The defaults of vLLM's LLMEngine on a GPU; its LLM class has larger ones.
VLLM_DEFAULTS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
STEP_SIZES = tuple(VLLM_DEFAULTS)
SHARED_ARGS = ("max_loras", "max_lora_rank", "lora_target_modules")
CAPTURED_TOKENS = 512  # vLLM captures steps of up to min(this, 2 * max_num_seqs) tokens
BLOCK_SIZE = 32  # the smallest that attention on a CPU takes; it decides which tokens are shared
KV_BYTES = 2**28
CONTEXT_TOKENS = 8192  # the narrow base's
PROCESS = "from serve.bench.gpu_counts.measure import main; main()"


def run(recipe: Recipe, cells: Sequence[tuple[int, int]] = CELLS) -> GpuCountsReport:
    """Count every cell in two engines. Raises GuardError if a process fails."""
    sizes = {name: recipe.engine.get(name, VLLM_DEFAULTS[name]) for name in STEP_SIZES}
    counts = []
    engines = ((VLLM_DEFAULTS, None), (sizes, _captured_tokens(sizes)))
    for engine, largest_graph in tqdm(engines, desc="gpu_counts", unit="engine"):
        counts.append(_count(_settings(recipe, cells, engine, largest_graph)))
    before, after = counts
    return GpuCountsReport(
        **origin(recipe),
        recipe_engine=sizes,
        default_engine=VLLM_DEFAULTS,
        rule_turn=recipe.rule_turn,
        captured_tokens=_captured_tokens(sizes),
        checks=_counted_checks(cells, before, after),
    )


def _settings(
    recipe: Recipe,
    cells: Sequence[tuple[int, int]],
    step_sizes: Mapping[str, Any],
    largest_graph: int | None,
) -> Settings:
    shared = {name: recipe.engine[name] for name in SHARED_ARGS if name in recipe.engine}
    return Settings(
        cells=list(cells),
        rule_turn=recipe.rule_turn,
        largest_graph=largest_graph,
        engine={
            **shared,
            **step_sizes,
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": KV_BYTES,
            "max_model_len": CONTEXT_TOKENS,
            "enforce_eager": True,  # the narrow base's own computation does not matter
        },
    )


def _counted_checks(
    cells: Sequence[tuple[int, int]], before: StepCounts, after: StepCounts
) -> list[CountedCheck]:
    """The checks of all cells, each with a new conversation and with a known one."""
    checks = []
    for (tokens, rules), steps_before, steps_after in zip(
        cells, before.checks, after.checks, strict=True
    ):
        for is_known in (False, True):
            checks.append(
                CountedCheck(
                    tokens=tokens,
                    rules=rules,
                    is_known=is_known,
                    before=steps_before[is_known],
                    after=steps_after[is_known],
                )
            )
    return checks


def _captured_tokens(sizes: Mapping[str, Any]) -> int:
    return int(min(CAPTURED_TOKENS, 2 * sizes["max_num_seqs"]))


def _count(settings: Settings) -> StepCounts:
    """Count in a process of its own, which takes the same path as on a GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        settings_path, counts_path = Path(scratch, "settings.json"), Path(scratch, "counts.json")
        settings_path.write_text(settings.model_dump_json(), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(settings_path), str(counts_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise GuardError(
                "the counting process failed",
                got=done.stderr.strip()[-2000:],
                remedy="It needs the CPU environment: make setup DEVICE=cpu",
            )
        return StepCounts.model_validate_json(counts_path.read_text(encoding="utf-8"))


def arguments(_: argparse.ArgumentParser) -> None:
    """Add this benchmark's options: it has none, because it counts for one recipe."""


def main(arguments: argparse.Namespace) -> None:
    """Count, write the report and print the table."""
    report = run(load_recipe(RECIPE))
    publish(report, arguments.runs / "gpu_counts_bench.json", table)
