"""Counts the steps of checks and their launches, in a process that takes the same path as on a GPU.

The engine is real: vLLM's scheduler, runner V2, adapters in slots. Its base has one narrow layer,
because steps depend on tokens alone. For each step vLLM's own launch code then runs at the shape of
Qwen3-4B, with kernels that count their programs and compute nothing. `run` starts this process.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import serve.bench.gpu_counts.process  # noqa: F401 - before vLLM

# isort: split
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm_alora.kv import partial_block_seams
from vllm_alora.low_rank.launch_grid import KERNELS, BoundedKernel

from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from serve.bench.gpu_counts.report import CountedStep, Settings, StepCounts
from serve.bench.gpu_counts.shape import LAYERS, PACKED_LAYERS
from serve.bench.gpu_counts.waits import KernelWaits, Waits
from serve.bench.narrow import narrow_base
from serve.bench.scores import judged
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine
from serve.engine.backends.start import start_decoder


class Launches:
    """The launches of the kernels since the last `take`."""

    def __init__(self) -> None:
        self._counted = (0, 0, 0)

    def add(self, *, launches: int = 0, programs: int = 0, programs_of_vllm: int = 0) -> None:
        """Add to the counts of launches, of programs, and of programs that vLLM wanted."""
        so_far = self._counted
        self._counted = (
            so_far[0] + launches,
            so_far[1] + programs,
            so_far[2] + programs_of_vllm,
        )

    def take(self) -> tuple[int, int, int]:
        """Return launches, programs, and the programs that vLLM wanted, and set all to 0."""
        counted = self._counted
        self._counted = (0, 0, 0)
        return counted


class EmptyKernel:
    """Stands for one of vLLM's kernels: counts its programs, and computes nothing."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self.arg_names = kernel.arg_names
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launches.add(launches=1, programs=math.prod(grid))
        return lambda *args, **options: None


class WantedKernel(BoundedKernel):  # type: ignore[misc]
    """Counts the programs that vLLM wants, then launches as the plugin does."""

    def __init__(self, kernel: EmptyKernel, launches: Launches) -> None:
        super().__init__(kernel)
        self._launches = launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self._launches.add(programs_of_vllm=math.prod(grid))
        return super().__getitem__(grid)


def count(settings: Settings) -> StepCounts:
    """Count the steps of one engine, check by check. For a process that does nothing else."""
    recipe = load_recipe("tiny").model_copy(
        update={"dtype": "float16", "rule_turn": settings.rule_turn}
    )
    # What a GPU's scheduler would find: this machine captures no graphs.
    partial_block_seams.in_step_above = lambda _: settings.largest_graph
    waits, adapters = KernelWaits(), max(rules for _, rules in settings.cells)
    steps = _counted_steps(waits)
    start = functools.partial(start_decoder, needs_seams=False)
    with (
        narrow_base(recipe) as narrow,
        random_adapters(narrow, [narrow.sharing_method], adapters) as folders,
        GuardEngine(narrow, by_name(folders), start_backend=start, **settings.engine) as engine,
    ):
        waits.watch()
        checks = []
        for tokens, rules in settings.cells:
            messages = conversation(PromptBuilder.of(narrow), tokens, seed=tokens + rules)
            names = list(engine.rules)[:rules]
            engine.forget()
            steps.clear()
            where = f"{tokens} tokens, {rules} rules"
            judged(engine.check(messages, names), where)
            steps_of_new = steps.copy()
            steps.clear()
            judged(engine.check(messages, names), where)
            checks.append((steps_of_new, steps.copy()))
    return StepCounts(checks=checks)


def _counted_steps(waits: KernelWaits) -> list[CountedStep]:
    """A list to which this process adds every step that it computes from now on."""
    launches, steps = Launches(), list[CountedStep]()
    for module, name in KERNELS:
        empty = EmptyKernel(getattr(module, name), launches)
        setattr(module, name, WantedKernel(empty, launches))
    execute_model = GPUModelRunner.execute_model

    @functools.wraps(execute_model)
    def counted(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = execute_model(runner, scheduler_output, *args, **kwargs)
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            launches.take()  # those of the narrow base
            (wrapper,) = runner.lora_manager._adapter_manager.punica_wrapper_mapping.values()
            _launch_all(wrapper, sum(scheduled.values()))
            steps.append(_step(scheduled, waits.take(), *launches.take()))
        return output

    setattr(GPUModelRunner, "execute_model", counted)  # noqa: B010 - mypy knows its type
    return steps


def _step(
    scheduled: Mapping[str, int], waits: Waits, launches: int, programs: int, programs_of_vllm: int
) -> CountedStep:
    """The counts of a step.

    `scheduled`: tokens by request. `launches`, `programs`: those of one layer.
    """
    return CountedStep(
        tokens=sum(scheduled.values()),
        requests=len(scheduled),
        launches=launches * LAYERS,
        programs=programs * LAYERS,
        programs_of_vllm=programs_of_vllm * LAYERS,
        waits=waits.of_plugin,
        waits_of_vllm=waits.of_vllm,
    )


def _launch_all(wrapper: Any, tokens: int) -> None:
    """Run vLLM's launch code once for each packed layer, on memory that nobody reads."""
    slots, rank = wrapper.lora_config.max_loras, wrapper.lora_config.max_lora_rank
    half = torch.float16
    for layer in PACKED_LAYERS:
        x = torch.empty(tokens, layer.reads, dtype=half)
        y = torch.empty(tokens, sum(layer.writes), dtype=half)
        a, b = [], []
        for width in layer.writes:
            a.append(torch.empty(slots, 1, rank, layer.reads, dtype=half))
            b.append(torch.empty(slots, 1, width, rank, dtype=half))
        wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, layer.writes)


def main() -> None:
    """Read the settings from the first file of the command line, write the counts to the second."""
    settings_path, counts_path = map(Path, sys.argv[1:])
    settings = Settings.model_validate_json(settings_path.read_text(encoding="utf-8"))
    counts_path.write_text(count(settings).model_dump_json(), encoding="utf-8")
