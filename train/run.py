"""Trains rules by the methods of a recipe: `python -m train.run --rule medical_advice`. Torch is
imported only where something is trained: `--help` and a rule that is up to date take no time. Knows
nothing of serving or of test metrics.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from guard.arguments import whole_numbers
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, is_current
from guard.machine.device import warn_if_busy
from guard.machine.provenance import gpus
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, Rule, check_labelling, load_rule, rule_names
from guard.twins import of_twins
from guard.weights.card import COMPOSITION, read_card
from guard.weights.predictions import DAY_ZERO
from train.examples import Row, Rows, load
from train.export import damage_of, export, finish_export
from train.job import Job
from train.methods import Trained, trainer_of

ALL = "all"
NO_MEMORY_ON_CPU = "DefaultCPUAllocator: can't allocate memory"  # in PyTorch's RuntimeError

JobAndRows = tuple[Job, Rows]


def run(
    selection: str,
    recipe: Recipe,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    force: bool = False,
    runs: Runs | None = None,
    rules: Path = RULES,
) -> None:
    """Train the selected rules where their inputs changed, by `methods` or by all the recipe's
    methods.

    A bad recipe, a method that the recipe does not list and a missing rule raise GuardError before
    any training. Any other fault is printed at once and stops its own weights alone: bad rows of a
    rule, a loss that diverges, too little memory, weights that another command is training.
    At the end a GuardError names all weights that were not trained.
    """
    builder = prompt_builder(recipe)
    settings = _settings(recipe, methods, seeds)
    failed: list[str] = []
    parents: list[Rule] = []
    composed: list[Rule] = []
    for name in rule_names(selection, rules):
        try:
            rule = load_rule(name, rules)
            for parent in rule.compose:
                load_rule(parent, rules)
            (composed if rule.compose else parents).append(rule)
        except GuardError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
    for at_once in (parents, composed):  # a composed rule is made of what was just trained
        work: list[JobAndRows] = []
        for rule in at_once:
            jobs = [Job(rule, recipe, *setting, builder, runs or Runs()) for setting in settings]
            try:
                if rule.compose:
                    check(jobs)
                outdated, without_threshold = outdated_jobs(jobs, force=force)
                work += outdated
                failed += without_threshold
            except GuardError as error:
                print(f"{rule.id}: {error}", flush=True)
                failed.append(rule.id)
        failed += claimed_and_trained(work, force=force)
    report_failed(failed)


def claimed_and_trained(work: Sequence[JobAndRows], *, force: bool) -> list[str]:
    """Check all jobs, claim them, and train those that are this command's. Returns the names of
    those that were not trained.
    """
    if work:
        warn_if_busy("training may take several times as long")
    check([job for job, _ in work])
    claimed, not_done = claimed_jobs(work, force=force)
    return [*not_done, *train(claimed)]


def report_failed(failed: Sequence[str]) -> None:
    """Raise GuardError naming what was not trained."""
    if failed:
        remedy = "The errors stand above; everything else is done"
        raise GuardError(f"not trained: {', '.join(failed)}", remedy=remedy)


def check(jobs: Sequence[Job]) -> None:
    """Raise GuardError naming a setting or a base that a method's trainer would refuse."""
    for job in {(job.recipe.name, job.method): job for job in jobs}.values():
        trainer_of(job).check(job)


def train(work: Sequence[JobAndRows]) -> list[str]:
    """Train and finish all jobs of `work`. Returns the names of the jobs that failed. Jobs that are
    trained together go first, with all the memory. The other jobs follow one by one, rule by rule.
    """
    failed: list[str] = []
    for part in _parts(work):
        failed += _train(part)
    return failed


def finish(job: Job, rows: Rows, trained: Trained) -> dict[str, Any]:
    """Calibrate trained weights and write their folder. Returns the card's metrics. The test logits
    of weights to serve come from the method's reference, because the served engine is held
    to them (eval/agreement.py). So they owe nothing to how training computed. Raises GuardError
    naming a row whose logit is not finite.
    """
    from train.adapter.composed import ComposedAdapter
    from train.adapter.reader import day_zero_logits
    from train.calibrate import calibrated
    from train.calibration.coverage import covered_by
    from train.calibration.validation import compared_with_parents, since_day_zero, twin_metrics

    seen = (*rows.validation, *rows.test)
    logits = list(trained.validation_logits)
    logits += trained.logits([row.prompt for row in seen[len(logits) :]])
    of_validation, of_test = logits[: len(rows.validation)], logits[len(rows.validation) :]
    _check_finite(job, rows.test, of_test)
    calibration, validated = calibrated(of_validation, rows.validation, job.rule)
    test = twin_metrics(of_twins(of_test, rows.test), calibration)
    metrics = {"validation": validated, "test": test}
    predictions = [(row.id, str(row.split), logit) for row, logit in zip(seen, logits, strict=True)]
    labels = [row.label for row in seen]
    if job.recipe.reader is not None:
        of_reader = day_zero_logits(job, seen)
        metrics["day_zero"] = since_day_zero(logits, of_reader, labels, len(of_validation))
        for row, logit in zip(seen, of_reader, strict=True):
            predictions.append((row.id, DAY_ZERO + row.split, logit))
    if isinstance(trained, ComposedAdapter):
        tested = labels[len(of_validation) :]
        answers = {"composed": (of_test, calibration), **trained.of_parents}
        metrics[COMPOSITION] = compared_with_parents(answers, tested)
    # A study's weights are never asked.
    covered = None if job.of_study else covered_by(job, of_validation, trained.logits)
    export(job, trained, predictions, calibration, metrics, covered)
    return metrics


def _check_finite(job: Job, rows: Sequence[Row], logits: Sequence[float]) -> None:
    pairs = zip(rows, logits, strict=True)
    broken = [row for row, logit in pairs if not math.isfinite(logit)]
    if broken:
        remedy = "Set the recipe's dtype to bfloat16 or float32, or lower its learning rate: "
        remedy += "training may have diverged"
        problem = "verdict logits are not finite"
        where = f"{broken[0].split} row {broken[0].id}"
        got = f"{len(broken)} of {len(rows)} rows in {job.recipe.dtype}"
        raise GuardError(problem, where=where, got=got, remedy=remedy)


def _settings(
    recipe: Recipe, methods: Sequence[str], seeds: Sequence[int]
) -> list[tuple[str, int]]:
    """Method and seed of each job of a rule. A method without seeds has seed 0 alone. Raises
    GuardError for a method that the recipe does not list.
    """
    settings: list[tuple[str, int]] = []
    for seed in seeds:
        for method in methods or recipe.methods:
            recipe.settings(method)
            settings.append((method, seed if METHODS[method].is_seeded else 0))
    return list(dict.fromkeys(settings))


def outdated_jobs(jobs: Sequence[Job], *, force: bool) -> tuple[list[JobAndRows], list[str]]:
    """The jobs of one rule that have to be done, with the rule's rows; and the names of the jobs
    whose threshold cannot be chosen anew. Raises GuardError where the rows were labelled for an
    earlier text of the rule.
    """
    outdated: list[Job] = []
    failed: list[str] = []
    for job in jobs:
        check_labelling(job.data, job.rule)
        job.read_inputs()
        if force or not is_current(job.folder, job.inputs):
            outdated.append(job)
        elif damage := damage_of(job.folder):
            print(f"{job.name}: to be trained again: {damage} ({job.folder})", flush=True)
            outdated.append(job)
        elif not _update_threshold(job):
            failed.append(job.name)
    rows: dict[str, Rows] = {}  # by what the prompts say of the rule
    for job in outdated:
        if job.rule_text not in rows:
            rows[job.rule_text] = load(job)
    return [(job, rows[job.rule_text]) for job in outdated], failed


def _update_threshold(job: Job) -> bool:
    """Choose the threshold of trained weights anew where their rule states another rate. Prints the
    state of the weights, and returns whether their threshold is right now.
    """
    try:
        state = _with_threshold(job)
    except GuardError as error:
        print(f"{job.name}: {error}", flush=True)
        return False
    print(f"{job.name}: {state}", flush=True)
    return True


def _with_threshold(job: Job) -> str:
    card = read_card(job.folder)
    if card.threshold_by != "rule":
        return f"up to date; its threshold is {card.threshold:.3f}, as `make calibrate` was told"
    if (card.max_fpr, card.max_fpr_twins) == (job.rule.max_fpr, job.rule.max_fpr_twins):
        return "up to date"
    from train.calibrate import recalibrate, wanted_rate

    rows = recalibrate(job)
    rate = wanted_rate(job.rule)
    return f"up to date; its threshold is chosen anew, {rate}, on {rows:,} validation rows"


def claimed_jobs(work: Sequence[JobAndRows], *, force: bool) -> tuple[list[JobAndRows], list[str]]:
    """The jobs that this command trains from now on; and the names of the jobs that failed. A job
    fails where another command trains it, or where its threshold cannot be chosen anew. A job that
    another command has finished meanwhile is in neither list.
    """
    claimed: list[JobAndRows] = []
    failed: list[str] = []
    for job, rows in work:
        try:
            job.claim()
        except GuardError as error:
            print(error, flush=True)
            failed.append(job.name)
            continue
        if force:
            job.forget()
        finish_export(job)
        if is_current(job.folder, job.inputs) and not damage_of(job.folder):
            job.close_scratch()
            if not _update_threshold(job):
                failed.append(job.name)
            continue
        claimed.append((job, rows))
    return claimed, failed


def _parts(work: Sequence[JobAndRows]) -> Iterator[list[JobAndRows]]:
    by_base: dict[tuple[str, str], list[JobAndRows]] = {}
    for job, rows in work:
        by_base.setdefault((job.recipe.name, job.method), []).append((job, rows))
    for part in by_base.values():
        if trainer_of(part[0][0]).trains_together:
            yield part
    for job, rows in work:
        if not trainer_of(job).trains_together:
            yield [(job, rows)]


def _train(part: Sequence[JobAndRows]) -> list[str]:
    started = time.monotonic()
    print(f"{', '.join(job.name for job, _ in part)}: training", flush=True)
    done = 0
    failed: list[str] = []
    trainer = trainer_of(part[0][0])
    try:
        for (job, rows), trained in zip(part, trainer.fit(part), strict=True):
            if not _finished(job, rows, trained, started):
                failed.append(job.name)
            done += 1
    except (GuardError, RuntimeError, MemoryError) as error:
        # The base or the machine stops all that are left.
        names = [job.name for job, _ in part[done:]]
        print(f"{', '.join(names)}: {_explained(error, part[0][0])}", flush=True)
        failed += names
    return failed


def _finished(job: Job, rows: Rows, trained: Trained | GuardError, started: float) -> bool:
    """Calibrate and write the weights, and print how good they are. Returns whether that succeeded.
    A fault stops this job alone: its neighbours are trained.
    """
    from safetensors import SafetensorError

    trained_s = time.monotonic() - started
    try:
        if isinstance(trained, GuardError):
            raise trained
        metrics = finish(job, rows, trained)
    except (GuardError, RuntimeError, MemoryError, OSError, SafetensorError) as error:
        print(f"{job.name}: {_explained(error, job)}", flush=True)
        return False
    for name, auroc in metrics.get("day_zero", {}).get("test", {}).items():
        low, high = auroc["auroc_ci95"]
        print(f"  AUROC on test rows, {name}: {auroc['auroc']:.3f} [{low:.3f}, {high:.3f}]")
    metrics = metrics["validation"]
    low, high = metrics["accuracy_ci95"]
    print(
        f"{job.name}: validation accuracy {metrics['accuracy']:.3f} [{low:.3f}, {high:.3f}], "
        f"AUROC {metrics['auroc']:.3f} on {metrics['n']:,} rows; trained after {trained_s:.0f} s, "
        f"finished after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return True


def _explained(error: Exception, job: Job) -> GuardError:
    """What stopped a training, with a remedy. Raises an `error` that is no fault of the machine."""
    import torch
    from safetensors import SafetensorError

    if isinstance(error, GuardError):
        return error
    if isinstance(error, OSError | SafetensorError):
        remedy = f"See that {job.folder.parent} can be written, and give the same command again"
        return GuardError(f"not written: {error}", where=job.folder, remedy=remedy)
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not no_memory and NO_MEMORY_ON_CPU not in str(error):
        raise error
    key = "window_tokens" if job.recipe.is_encoder else "context_tokens"
    remedy = f"Drop the longest rows (and lower the recipe's {key}), or take a larger one"
    return GuardError(f"the device has no memory for this training: {error}", remedy=remedy)


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def see_one_gpu(environment: MutableMapping[str, str]) -> None:
    """Leave this process the first of the GPUs that it may use. Must come before torch is imported.
    Transformers would spread a LoRA's batches over all of them. Raises GuardError in one of several
    processes that a launcher has started: each would train all rules.
    """
    processes = environment.get("WORLD_SIZE", "1")
    if processes != "1":
        problem = "a command trains its rules in one process"
        remedy = f"Start one command a GPU, each with rules and {VISIBLE_GPUS} of its own"
        raise GuardError(problem, got=f"WORLD_SIZE={processes}", remedy=remedy)
    named = environment.get(VISIBLE_GPUS)
    devices = [str(number) for number in range(len(gpus()))]
    if named is not None:
        devices = [name for name in named.split(",") if name]
    if devices:
        environment[VISIBLE_GPUS] = devices[0]


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.run",
        description="Train rules on one base model by the methods of its recipe, "
        "from the data of `python -m data.build`.",
    )
    parser.add_argument("--rule", required=True, help="rules separated by commas, or 'all'")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    method = "a method that the recipe lists (default: all of them)"
    parser.add_argument("--method", default=ALL, help=method)
    of_seeds = "seeds separated by commas (default: 0, the one that is served)"
    parser.add_argument("--seeds", type=whole_numbers, default=(0,), help=of_seeds)
    force = "train again, from the start, even if nothing changed"
    parser.add_argument("--force", action="store_true", help=force)
    args = parser.parse_args()
    recipe = load_recipe(args.model)
    methods = [] if args.method == ALL else [args.method]
    see_one_gpu(os.environ)
    run(args.rule, recipe, methods=methods, seeds=args.seeds, force=args.force)


if __name__ == "__main__":
    main()
