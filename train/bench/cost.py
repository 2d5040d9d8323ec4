"""What training aLoRAs costs: suffixes on cached prefixes against TRL and PEFT.

It is `make bench NAME=train`.

Both sides train on the same rows of random words, in batches of similar length and parts of bounded
size, and take turns. Every measurement is a process of its own, so that its peak memory is its own.
All figures of a report come from one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from guard.files.atomic import atomic_write
from guard.machine.provenance import peak_memory_mib, provenance
from train.bench.cost_report import BATCH, CACHED, TRL, RunCell, StepCell, Timing, draw, table
from train.bench.workload import SUFFIX, Base, job_of, pool, random_rows
from train.examples import Rows
from train.job import Job
from train.process import process_of

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from train.prefix.fleet import Fleet

HOST_BYTES = 2**36  # of cached prefixes: all of them


@dataclass(frozen=True)
class CostGrid:
    """How much to measure."""

    bases: tuple[Base, ...] = ("tiny", "25M")
    prefixes: tuple[int, ...] = (200, 1000, 4000)
    repeats: int = 3
    steps: int = 5
    examples: int = 1000
    epochs: int = 3
    rules: tuple[int, ...] = (1, 10, 100)
    # The most steps of a fleet that are measured, counted over its adapters; others take as long.
    adapter_steps: int = 600


QUICK = CostGrid(
    bases=("tiny",),
    prefixes=(200, 1000),
    repeats=1,
    steps=2,
    examples=64,
    rules=(1, 10),
    adapter_steps=40,
)


@dataclass(frozen=True)
class TimedSteps:
    """Seconds of all steps but the first; peak MiB above the base."""

    steps_s: list[float]
    mib: float
    total_s: float = 0.0  # of the whole training
    prefixes_s: float = 0.0  # of computing the prefixes of the rows once

    @property
    def median_s(self) -> float:
        """The median time of a step."""
        return statistics.median(self.steps_s)


def trl_steps(base: Base, prefix: int, steps: int) -> TimedSteps:
    """Steps of TRL and PEFT on whole prompts."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(base, Path(folder), max_steps=steps + 1, per_device_train_batch_size=BATCH)
        return _timed_trl(job, _equal_rows(job, prefix))


def cached_steps(base: Base, prefix: int, steps: int) -> TimedSteps:
    """Steps on cached prefixes, and the seconds for the batch's prefixes."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(base, Path(folder), max_steps=steps + 1, per_device_train_batch_size=BATCH)
        fleet = _fleet([job], _equal_rows(job, prefix))
        before = _peak_mib()
        prefixes_s = _seconds(fleet.begin)
        steps_s = [_seconds(lambda: list(fleet.step())) for _ in range(steps + 1)]
    return TimedSteps(steps_s[1:], _peak_mib() - before, prefixes_s=prefixes_s)


def _equal_rows(job: Job, prefix: int) -> Rows:
    """One batch of rows with prefixes of so many tokens."""
    return Rows(random_rows(job.builder, [prefix] * BATCH), (), ())


def trl_run(grid: CostGrid) -> RunCell:
    """The first epoch of one rule with TRL and PEFT; the others take as long."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of("tiny", Path(folder), num_train_epochs=1)
        epoch_s = _timed_trl(job, Rows(pool(job.builder, grid.examples), (), ())).total_s
    return RunCell(TRL, 1, epoch_s * grid.epochs, 1 / grid.epochs)


def cached_run(grid: CostGrid, rules: int) -> RunCell:
    """`rules` rules on one pool: all prefixes and as many steps as the grid allows."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(rule) for rule in range(rules)]
        jobs = [job_of("tiny", path, num_train_epochs=grid.epochs) for path in folders]
        fleet = _fleet(jobs, Rows(pool(jobs[0].builder, grid.examples), (), ()))
        prefixes_s = _seconds(fleet.begin)
        steps = fleet.members[0].steps
        measured = min(steps, max(2, grid.adapter_steps // rules))
        numbers = [number * steps // measured for number in range(measured)]
        steps_s = _seconds(lambda: _steps_at(fleet, numbers))
    share = measured / steps
    return RunCell(CACHED, rules, prefixes_s + steps_s * steps / measured, share)


def _steps_at(fleet: Fleet, steps: Iterable[int]) -> None:
    """The steps of these numbers, to be spread over the epochs: their batches are not equally
    long.
    """
    for step in steps:
        for member in fleet.members:
            member.step = step
        list(fleet.step())


def _timed_trl(job: Job, rows: Rows) -> TimedSteps:
    from train.adapter.trl import trl_trainer

    trainer = trl_trainer(job, rows)
    steps_s: list[float] = []
    trainer.add_callback(_step_timer(steps_s))
    before = _peak_mib()
    total_s = _seconds(trainer.train)
    return TimedSteps(steps_s[1:], _peak_mib() - before, total_s=total_s)


def _step_timer(seconds: list[float]) -> TrainerCallback:
    """Appends the seconds of every step."""
    from transformers import TrainerCallback

    class StepTimer(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.started)

    return StepTimer()


def _fleet(jobs: Sequence[Job], rows: Rows) -> Fleet:
    from train.adapter.load import load_base
    from train.adapter.settings import trainer_config
    from train.prefix.budget import Budget
    from train.prefix.fleet import Fleet
    from train.prefix.member import Member

    members = [Member(job, rows, trainer_config(job)) for job in jobs]
    base = load_base(jobs[0].recipe, members[0].config.device)
    return Fleet(base, members, Budget(host=HOST_BYTES))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _peak_mib() -> float:
    """The most memory that this process has had: of the GPU if there is one, else resident."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_memory_mib()


def measure(
    grid: CostGrid, *, shares_process: bool = False
) -> tuple[list[StepCell], list[RunCell]]:
    """The whole grid, the two sides in turns.

    With `shares_process`, whole runs stay in this process, and steps alone, whose memory is
    measured, have their own.
    """
    in_process = _alone
    if shares_process:
        in_process = _here
    points = list(itertools.product(grid.bases, grid.prefixes))
    total = 2 * len(points) * grid.repeats + 1 + len(grid.rules)
    with tqdm(total=total, desc="bench", unit="run") as bar:
        steps = [_step_cell(grid, base, prefix, bar) for base, prefix in points]
        runs: list[RunCell] = [in_process(bar, trl_run, grid)]
        for rules in grid.rules:
            runs.append(in_process(bar, cached_run, grid, rules))
    return steps, runs


def _step_cell(grid: CostGrid, base: Base, prefix: int, bar: Any) -> StepCell:
    trl: list[TimedSteps] = []
    cached: list[TimedSteps] = []
    for _ in range(grid.repeats):
        trl.append(_alone(bar, trl_steps, base, prefix, grid.steps))
        cached.append(_alone(bar, cached_steps, base, prefix, grid.steps))
    return StepCell(
        base=base,
        prefix=prefix,
        suffix=SUFFIX,
        trl_s=Timing.of([timed.median_s for timed in trl]),
        cached_first_s=Timing.of([timed.prefixes_s + timed.median_s for timed in cached]),
        cached_s=Timing.of([timed.median_s for timed in cached]),
        trl_mib=statistics.median(timed.mib for timed in trl),
        cached_mib=statistics.median(timed.mib for timed in cached),
    )


def _alone(bar: Any, work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work` in a process of its own, one run on the progress bar."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        outcome = process.submit(work, *arguments).result()
    bar.update()
    return outcome


def _here(bar: Any, work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work` in this process, one run on the progress bar."""
    outcome = work(*arguments)
    bar.update()
    return outcome


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    quick = "a coarse grid of about three minutes"
    parser.add_argument("--quick", action="store_true", help=quick)


def main(arguments: argparse.Namespace) -> None:
    """Measure and write the report, its tables and its picture."""
    process_of(os.environ)  # one GPU, whatever is visible
    steps, runs = measure(QUICK if arguments.quick else CostGrid())
    out: Path = arguments.runs / "train_bench.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        **provenance(),
        "steps": [asdict(cell) for cell in steps],
        "runs": [asdict(run) for run in runs],
    }
    with atomic_write(out) as part:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    tables = table(steps, runs)
    out.with_suffix(".md").write_text(tables + "\n", encoding="utf-8")
    draw(steps, runs, out.with_suffix(".png"))
    print(f"{tables}\n\nwritten to {out}, .md and .png")
