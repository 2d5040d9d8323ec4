"""Trains the adapters of rules: `python -m train.run --rule medical_advice --model tiny`. Knows nothing of serving or of test metrics.

Torch and what stands on it are imported only where something is trained: `--help` and a rule that is up to date take no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from guard.errors import exits_cleanly
from guard.layout import Runs, is_current
from guard.prompt import PromptBuilder
from guard.recipe import METHODS, Method, Recipe, load_recipe
from guard.rule import RULES, load_rule, rule_names
from train.examples import Rows, load
from train.job import Job


def run(
    selection: str,
    recipe: Recipe,
    *,
    methods: Sequence[Method] = METHODS,
    seeds: Sequence[int] = (0,),
    force: bool = False,
    runs: Runs | None = None,
    rules: Path = RULES,
) -> None:
    """Train the adapters of the selected rules where their inputs changed. Raises GuardError for bad inputs before any training."""
    builder = PromptBuilder.from_base(recipe.base_path, revision=recipe.revision, answer_prefix=recipe.answer_prefix)
    chosen = [load_rule(name, rules) for name in rule_names(selection, rules)]
    jobs = [Job(rule, recipe, method, seed, builder, runs or Runs()) for rule in chosen for seed in seeds for method in methods]
    for job in jobs:
        if force:
            job.forget()
    outdated = [job for job in jobs if not is_current(job.folder, job.inputs)]
    for job in jobs:
        if job not in outdated:
            print(f"{job.name}: up to date")
    rows = {job.rule.id: load(job.data, job.rule, builder, recipe.context_tokens) for job in outdated}
    check(outdated)
    for job in outdated:
        train(job, rows[job.rule.id])


def check(jobs: Sequence[Job]) -> None:
    """Raise GuardError naming the key or value of the recipe that PEFT or TRL would refuse."""
    if jobs:
        from train.adapter import lora_config, trainer_config

        for job in {job.method: job for job in jobs}.values():
            lora_config(job)
            trainer_config(job)


def train(job: Job, rows: Rows) -> None:
    """Examples -> adapter -> calibration -> adapter folder."""
    from train.adapter import fit
    from train.calibrate import calibrate, validation_metrics
    from train.export import export
    from train.predict import verdict_logits

    started = time.monotonic()
    print(f"{job.name}: training on {len(rows.train)} examples", flush=True)
    model = fit(job, rows.train)

    print(f"{job.name}: predicting {len(rows.validation)} validation and {len(rows.test)} test examples", flush=True)
    seen = (*rows.validation, *rows.test)
    logits = verdict_logits(model, [row.prompt for row in seen], job.builder)

    validation, labels = logits[: len(rows.validation)], [row.label for row in rows.validation]
    calibration = calibrate(validation, labels)
    metrics = validation_metrics(validation, labels, calibration)

    export(job, model, seen, logits, calibration, metrics)
    low, high = metrics["accuracy_ci95"]
    print(
        f"{job.name}: validation accuracy {metrics['accuracy']:.3f} [{low:.3f}, {high:.3f}], AUROC {metrics['auroc']:.3f}, "
        f"temperature {calibration.temperature:.2f}, threshold {calibration.threshold:.2f}, {time.monotonic() - started:.0f} s",
        flush=True,
    )


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.run",
        description="Train the LoRA and the aLoRA adapter of rules on one base model, from the data of `python -m data.build`.",
    )
    parser.add_argument("--rule", required=True, help="a rule in recipes/rules, several separated by commas, or 'all'")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models (default: tiny)")
    parser.add_argument("--method", choices=(*METHODS, "both"), default="both", help="which adapters to train (default: both)")
    parser.add_argument("--seeds", type=_seeds, default=(0,), help="seeds separated by commas (default: 0, the one that is served)")
    parser.add_argument("--force", action="store_true", help="train again, from the start, even if nothing changed")
    args = parser.parse_args()
    methods = METHODS if args.method == "both" else (args.method,)
    run(args.rule, load_recipe(args.model), methods=methods, seeds=args.seeds, force=args.force)


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if min(seeds) < 0:
        raise argparse.ArgumentTypeError("seeds are whole numbers from 0")
    return seeds


if __name__ == "__main__":
    main()
