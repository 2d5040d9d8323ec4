"""Trains the adapters of rules: `python -m train.run --rule medical_advice --model tiny`. Knows nothing of serving or of test metrics.

Torch and what stands on it are imported only where something is trained: `--help` and a rule that is up to date take no time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from guard.card import read_card
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, is_current
from guard.method import METHODS
from guard.prompt import PromptBuilder
from guard.provenance import gpus
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, load_rule, rule_names
from train.examples import Rows, load
from train.job import Job

LAUNCHED = {
    f"{group}{name}"
    for group in ("", "LOCAL_", "GROUP_", "ROLE_")
    for name in ("RANK", "WORLD_SIZE")
} | {
    "MASTER_ADDR",
    "MASTER_PORT",
}

if TYPE_CHECKING:
    from peft import PeftModel

    from train.prefix.trainer import Fitted


class Process(NamedTuple):
    """Its number, how many share out the rules, and how many of them this machine."""

    number: int = 0
    of: int = 1
    here: int = 1


ALONE = Process()


def run(
    selection: str,
    recipe: Recipe,
    *,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    force: bool = False,
    runs: Runs | None = None,
    rules: Path = RULES,
    process: Process = ALONE,
) -> None:
    """Train the adapters of the selected rules where their inputs changed; of several processes, each its share.

    A rule whose data are bad (of `all` rules also one whose file is), an adapter whose loss diverges, and one that another command is
    training leave the others untouched; what went wrong is printed where it happens, bad input before any training; a GuardError that
    names them is raised when all the rest is done. A bad recipe, and a rule named by mistake, are raised at once.
    """
    builder = PromptBuilder.of(recipe)
    failed: list[str] = []
    work: list[tuple[Job, Rows]] = []
    for name in rule_names(selection, rules)[process.number :: process.of]:
        try:
            rule = load_rule(name, rules)
            jobs = [
                Job(rule, recipe, method, seed, builder, runs or Runs())
                for seed in seeds
                for method in methods
            ]
            work += _outdated(jobs, force=force)
        except GuardError as error:
            print(error, flush=True)
            failed.append(name)
    check([job for job, _ in work])
    free: list[tuple[Job, Rows]] = []
    for job, rows in work:
        try:
            job.claim()
        except GuardError as error:
            print(error, flush=True)
            failed.append(job.name)
            continue
        if force:
            job.forget()
        free.append((job, rows))
    failed += train(free, process.here)
    if failed:
        raise GuardError(
            f"not trained: {', '.join(failed)}",
            remedy="The errors stand above; everything else is done",
        )


def _outdated(jobs: Sequence[Job], *, force: bool) -> list[tuple[Job, Rows]]:
    """The jobs of one rule that are to be done, with the rule's examples."""
    outdated = [job for job in jobs if force or not is_current(job.folder, job.inputs)]
    for job in jobs:
        if job not in outdated:
            print(f"{job.name}: {_with_threshold(job)}", flush=True)
    if not outdated:
        return []
    one = outdated[0]
    rows = load(one.data, one.rule, one.recipe, one.builder)
    return [(job, rows) for job in outdated]


def _with_threshold(job: Job) -> str:
    """What is said of a trained adapter, once its threshold is chosen at the rate that its rule states."""
    if read_card(job.folder).max_fpr == job.rule.max_fpr:
        return "up to date"
    from train.recalibrate import recalibrate

    recalibrate(job)
    rate = (
        "balanced"
        if job.rule.max_fpr is None
        else f"for at most {100 * job.rule.max_fpr:g} % false positives"
    )
    return f"up to date; its threshold is chosen anew, {rate}"


def check(jobs: Sequence[Job]) -> None:
    """Raise GuardError naming the key or value of the recipe that PEFT or TRL would refuse, or the modules that the base has not."""
    if jobs:
        from train.adapter.load import try_on
        from train.adapter.settings import lora_config, trainer_config

        for job in {job.method: job for job in jobs}.values():
            lora_config(job)
            trainer_config(job)
            try_on(job)


def train(jobs: Sequence[tuple[Job, Rows]], processes: int = 1) -> list[str]:
    """Train and finish all jobs: the aLoRAs together on cached prefixes, then one LoRA after another. Returns the failed ones' names.

    `processes` share this machine's memory.
    """
    alora, lora = (
        [(job, rows) for job, rows in jobs if job.method == method] for method in ("alora", "lora")
    )
    return (_train_aloras(alora, processes) if alora else []) + [
        name for job, rows in lora for name in _train_lora(job, rows)
    ]


def _train_aloras(jobs: Sequence[tuple[Job, Rows]], processes: int) -> list[str]:
    from train.prefix import trainer as shared_prefix

    started = time.monotonic()
    print(f"{', '.join(job.name for job, _ in jobs)}: training", flush=True)
    left = list(jobs)
    failed: list[str] = []
    try:
        for fitted in shared_prefix.fit(jobs, processes):
            failed += _finished(*left.pop(0), fitted, started)
    except GuardError as error:  # what stops one of them for its base or the machine stops all
        print(error, flush=True)
        failed += [job.name for job, _ in left]
    return failed


def _train_lora(job: Job, rows: Rows) -> list[str]:
    from train.adapter import trl as adapter

    started = time.monotonic()
    print(f"{job.name}: training", flush=True)
    try:
        return _finished(job, rows, adapter.fit(job, rows), started)
    except GuardError as error:
        print(error, flush=True)
        return [job.name]


def _finished(
    job: Job, rows: Rows, fitted: PeftModel | Fitted | GuardError, started: float
) -> list[str]:
    """Calibrate and write the adapter; its name if that failed."""
    trained = time.monotonic() - started
    try:
        if isinstance(fitted, GuardError):
            raise fitted
        metrics = finish(job, rows, fitted)
    except GuardError as error:
        print(error, flush=True)
        return [job.name]
    low, high = metrics["accuracy_ci95"]
    print(
        f"{job.name}: validation accuracy {metrics['accuracy']:.3f} [{low:.3f}, {high:.3f}], AUROC {metrics['auroc']:.3f}; "
        f"trained after {trained:.0f} s, finished after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return []


def finish(job: Job, rows: Rows, fitted: PeftModel | Fitted) -> dict[str, Any]:
    """Trained model -> calibration -> adapter folder; the validation metrics.

    The test split always goes through plain PEFT: what the served engine is held to (eval/agreement.py) owes nothing to cached prefixes.
    """
    from train.adapter.predict import verdict_logits
    from train.calibrate import calibrate, validation_metrics
    from train.export import export
    from train.prefix.trainer import Fitted

    model = fitted.model if isinstance(fitted, Fitted) else fitted
    known = fitted.validation_logits if isinstance(fitted, Fitted) else []
    seen = (*rows.validation, *rows.test)
    logits = [
        *known,
        *verdict_logits(model, [row.prompt for row in seen[len(known) :]], job.builder),
    ]
    validation, labels = logits[: len(rows.validation)], [row.label for row in rows.validation]
    calibration = calibrate(validation, labels, job.rule.max_fpr)
    metrics = validation_metrics(validation, labels, calibration)
    export(job, model, seen, logits, calibration, metrics)
    return metrics


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.run",
        description="Train the LoRA and the aLoRA adapter of rules on one base model, from the data of `python -m data.build`.",
    )
    parser.add_argument(
        "--rule",
        required=True,
        help="a rule in recipes/rules, several separated by commas, or 'all'",
    )
    parser.add_argument(
        "--model", default="tiny", help="a recipe in recipes/models (default: tiny)"
    )
    parser.add_argument(
        "--method",
        choices=(*METHODS, "both"),
        default="both",
        help="which adapters to train (default: both)",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=(0,),
        help="seeds separated by commas (default: 0, the one that is served)",
    )
    parser.add_argument(
        "--force", action="store_true", help="train again, from the start, even if nothing changed"
    )
    args = parser.parse_args()
    methods = METHODS if args.method == "both" else (args.method,)
    process = process_of(os.environ)
    try:
        run(
            args.rule,
            load_recipe(args.model),
            methods=methods,
            seeds=args.seeds,
            force=args.force,
            process=process,
        )
    except GuardError as error:
        if process.of == 1:
            raise
        print(
            f"error: {error}", file=sys.stderr
        )  # a launcher kills all its processes when one of them fails


def process_of(environment: MutableMapping[str, str]) -> Process:
    """Which of the processes that `accelerate launch` or `torchrun` started this one is; from here on it is a world of its own.

    Processes share out rules, not tokens: nothing has to be exchanged, and no trainer below may think that it has to. Each sees the one
    GPU of its rank, and a process alone the first: Transformers would spread a LoRA's batches over all. Must come before torch is
    imported. Raises GuardError for fewer GPUs than processes.
    """
    rank, world, local = (
        int(environment.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    here = int(environment.get("LOCAL_WORLD_SIZE", world))
    if world > 1:
        for name in [
            name
            for name in environment
            if name in LAUNCHED or name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
        ]:
            del environment[name]
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = (
        [str(number) for number in range(len(gpus()))]
        if named is None
        else [name for name in named.split(",") if name]
    )
    if devices:
        if here > len(devices):
            raise GuardError(
                "each process needs a GPU",
                got=f"{here} processes, {len(devices)} GPUs",
                remedy="Start as many as there are",
            )
        environment["CUDA_VISIBLE_DEVICES"] = devices[local]
    return Process(rank, world, here)


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if min(seeds) < 0:
        raise argparse.ArgumentTypeError("seeds are whole numbers from 0")
    return seeds


if __name__ == "__main__":
    main()
