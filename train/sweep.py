"""Settings of a rule's aLoRA against each other: ranks, learning rates, seeds, trained together on the same cached prefixes.

A member of the sweep costs its suffixes only. The table is of the validation split; the test split stays untouched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, load
from guard.layout import ROOT, Runs
from guard.prompt import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import RuleTurn, load_rule
from train.examples import Rows
from train.examples import load as load_rows
from train.job import Job

GRIDS = ROOT / "recipes" / "sweeps"
Values = Annotated[list[Any], Field(min_length=1)]


class Grid(Strict):
    """What to try, each value a list: every combination, with every seed. `lora` and `trainer` are the recipe's arguments."""

    rule_turn: list[RuleTurn] = Field(
        default_factory=list
    )  # what the adapter is told; an empty list: as in the recipe
    lora: dict[str, Values] = Field(default_factory=dict)
    trainer: dict[str, Values] = Field(default_factory=dict)
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)

    def points(self) -> Iterator[Point]:
        """Every combination."""
        turn = {"rule_turn": self.rule_turn} if self.rule_turn else {}
        names = [
            (part, name)
            for part, given in (("", turn), ("lora", self.lora), ("trainer", self.trainer))
            for name in given
        ]
        for values in itertools.product(
            *turn.values(), *self.lora.values(), *self.trainer.values()
        ):
            yield Point(
                tuple(
                    (part, name, value) for (part, name), value in zip(names, values, strict=True)
                )
            )


@dataclass(frozen=True)
class Point:
    """One combination: `(part of the recipe's adapter, or nothing for the recipe itself, argument, value)`."""

    settings: tuple[tuple[str, str, Any], ...]

    @property
    def name(self) -> str:
        """`r=8 learning_rate=0.001`."""
        return " ".join(f"{name}={value}" for _, name, value in self.settings) or "as in the recipe"

    def recipe(self, recipe: Recipe) -> Recipe:
        """`recipe` with these settings for the aLoRA; `lora_alpha` in its ratio to `r` unless it is one of them."""
        given: dict[str, dict[str, Any]] = {"": {}, "lora": {}, "trainer": {}}
        for part, name, value in self.settings:
            given[part][name] = value
        adapter = recipe.methods["alora"]
        if "r" in given["lora"] and {"r", "lora_alpha"} <= adapter.lora.keys():
            given["lora"] = {
                "lora_alpha": adapter.lora["lora_alpha"] * given["lora"]["r"] / adapter.lora["r"]
            } | given["lora"]
        changed = adapter.model_copy(
            update={part: getattr(adapter, part) | given[part] for part in ("lora", "trainer")}
        )
        return recipe.model_copy(
            update={"methods": {**recipe.methods, "alora": changed}} | given[""]
        )


@dataclass(frozen=True)
class SweepRuns(Runs):
    """The layout of `runs/`, with the adapters of one point of a sweep out of the way of those that are served."""

    point: str = ""

    def adapter(self, model: str, rule: str, method: str, seed: int = 0) -> Path:
        """Scratch only: a sweep keeps figures, not adapters."""
        return (
            self.root / "sweeps" / ".scratch" / model / rule / self.point / f"{method}-seed{seed}"
        )


class Trial(Strict):
    """One point with one seed: metrics of the validation split, and which of its rows were judged right."""

    point: str
    rank: int
    seed: int
    inputs: str  # fingerprint of all that decides it
    accuracy: float
    auroc: float
    nll: float
    correct: list[bool]


def sweep(
    rule: str, grid: Path, recipe: Recipe, *, runs: Runs | None = None, force: bool = False
) -> list[Trial]:
    """Train what is not yet in the sweep's file, all together, and write its table and picture. Raises GuardError for bad input first."""
    from train.adapter.load import try_on
    from train.adapter.settings import lora_config, trainer_config

    runs = runs or Runs()
    builder = PromptBuilder.of(recipe)
    stated, known = load(grid, Grid), load_rule(rule)
    jobs = [
        (
            point,
            Job(
                known,
                point.recipe(recipe),
                "alora",
                seed,
                builder,
                SweepRuns(runs.root, point.name),
            ),
        )
        for point in stated.points()
        for seed in stated.seeds
    ]
    for _, job in jobs:
        lora_config(job)
        trainer_config(job)
        try_on(job)
    recipes = {job.recipe.rule_turn: job.recipe for _, job in jobs}
    rows = {
        turn: load_rows(runs.data(rule), known, each, builder) for turn, each in recipes.items()
    }
    for _, job in jobs if force else ():
        job.forget()
    out = runs.root / "sweeps" / f"{recipe.name}-{rule}-{grid.stem}.json"
    done = {} if force else {trial.inputs: trial for trial in _read(out)}
    missing = [(point, job) for point, job in jobs if job.inputs not in done]
    print(f"{len(jobs)} adapters of {rule}, {len(missing)} of them to be trained", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    for _, job in missing:
        job.claim()
    for trial in _trained(missing, rows):
        done[trial.inputs] = trial
        with atomic_write(out) as part:  # kept if what follows is interrupted
            part.write_text(
                json.dumps([each.model_dump() for each in done.values()]) + "\n", encoding="utf-8"
            )
    trials = [
        done[job.inputs].model_copy(update={"point": point.name})
        for point, job in jobs
        if job.inputs in done
    ]
    told = table(trials, len(stated.seeds))
    out.with_suffix(".md").write_text(told + "\n", encoding="utf-8")
    picture(trials, f"{rule} on {recipe.name}", out.with_suffix(".png"))
    print(f"\n{told}\n\nwritten to {out}, .md and .png")
    return trials


def _read(file: Path) -> list[Trial]:
    return (
        [Trial.model_validate(each) for each in json.loads(file.read_text(encoding="utf-8"))]
        if file.is_file()
        else []
    )


def _trained(jobs: Sequence[tuple[Point, Job]], rows: Mapping[RuleTurn, Rows]) -> Iterator[Trial]:
    from train.calibrate import calibrate, validation_metrics
    from train.prefix import trainer as shared_prefix

    if not jobs:
        return
    labels = [row.label for row in rows[jobs[0][1].recipe.rule_turn].validation]
    for (point, job), fitted in zip(
        jobs, shared_prefix.fit([(job, rows[job.recipe.rule_turn]) for _, job in jobs]), strict=True
    ):
        try:
            if isinstance(fitted, GuardError):
                raise fitted
            calibration = calibrate(fitted.validation_logits, labels)
        except GuardError as error:
            print(f"{point.name}: {error}", flush=True)
            continue
        metrics = validation_metrics(fitted.validation_logits, labels, calibration)
        judged = [
            calibration.p_violation(logit) >= calibration.threshold
            for logit in fitted.validation_logits
        ]
        yield Trial(
            point=point.name, rank=job.lora.get("r", 8), seed=job.seed, inputs=job.inputs, accuracy=metrics["accuracy"],
            auroc=metrics["auroc"], nll=metrics["nll"], correct=[found == bool(label) for found, label in zip(judged, labels, strict=True)],
        )  # fmt: skip
    for _, job in jobs:
        job.close_scratch()
        shutil.rmtree(job.folder.parent, ignore_errors=True)  # the point's checkpoints


def by_point(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The trials of each point, seeds together, in the grid's order."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.point, []).append(trial)
    return found


def advice(trials: Sequence[Trial]) -> tuple[str, float]:
    """The point of smallest rank that is not worse than the best one beyond noise, and how much worse it is, in accuracy.

    Each rank stands by its best point. Noise is that of the validation rows: the 95 % interval of the mean paired difference of the
    rows' correctness, each averaged over the seeds.
    """
    points = by_point(trials)
    right = {
        name: np.mean([trial.correct for trial in seeds], axis=0) for name, seeds in points.items()
    }
    best = max(right, key=lambda name: right[name].mean())
    ranks = sorted({seeds[0].rank for seeds in points.values()})
    for rank in ranks:
        name = max(
            (name for name, seeds in points.items() if seeds[0].rank == rank),
            key=lambda name: right[name].mean(),
        )
        worse = right[best] - right[name]
        if worse.mean() <= 1.96 * worse.std(ddof=1) / len(worse) ** 0.5:
            return name, float(worse.mean())
    raise AssertionError("the best point is not worse than itself")


def table(trials: Sequence[Trial], seeds: int) -> str:
    """Markdown: a line a point, mean and range over those of its `seeds` that were trained, and the rank to take."""
    if not trials:
        return "No adapter was trained; the errors stand above."
    lines = ["| settings | seeds | accuracy % | range | AUROC | nll |", "|---|---|---|---|---|---|"]
    for name, known in by_point(trials).items():
        accuracy = [100 * trial.accuracy for trial in known]
        auroc, nll = (
            sum(getattr(trial, metric) for trial in known) / len(known)
            for metric in ("auroc", "nll")
        )
        spread = f"{np.mean(accuracy):.1f} | {min(accuracy):.1f} to {max(accuracy):.1f}"
        lines.append(f"| {name} | {len(known)} of {seeds} | {spread} | {auroc:.3f} | {nll:.3f} |")
    complete = [
        trial for known in by_point(trials).values() if len(known) == seeds for trial in known
    ]
    if not complete:
        return "\n".join(
            [*lines, "", "No settings were trained with all seeds; the errors stand above."]
        )
    name, worse = advice(complete)
    rows = len(trials[0].correct)
    told = f"Smallest rank within noise of the best ({rows} validation rows): **{name}**, {100 * worse:.1f} points below it."
    return "\n".join([*lines, "", told])


def picture(trials: Sequence[Trial], title: str, path: Path) -> None:
    """Validation accuracy over the rank, a line for each of the other settings, a dot a seed."""
    from matplotlib.figure import Figure

    if not trials:
        return
    figure = Figure(figsize=(7, 4.5), dpi=150)
    axes = figure.add_subplot()
    lines: dict[str, dict[int, list[float]]] = {}
    for trial in trials:
        others = " ".join(part for part in trial.point.split() if not part.startswith("r="))
        lines.setdefault(others or "as in the recipe", {}).setdefault(trial.rank, []).append(
            100 * trial.accuracy
        )
    for name, ranks in lines.items():
        (line,) = axes.plot(
            list(ranks),
            [float(np.mean(values)) for values in ranks.values()],
            marker="o",
            label=name,
        )
        for rank, values in ranks.items():
            axes.plot([rank] * len(values), values, "_", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        sorted({trial.rank for trial in trials}),
        labels=[str(rank) for rank in sorted({trial.rank for trial in trials})],
    )
    axes.set(xlabel="rank", ylabel="validation accuracy, %", title=title)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rule", required=True, help="a rule in recipes/rules")
    parser.add_argument(
        "--model", default="tiny", help="a recipe in recipes/models (default: tiny)"
    )
    parser.add_argument(
        "--grid",
        default=str(GRIDS / "rank.yaml"),
        help="what to try (default: recipes/sweeps/rank.yaml)",
    )
    parser.add_argument("--force", action="store_true", help="train again what was trained before")
    args = parser.parse_args()
    sweep(args.rule, Path(args.grid), load_recipe(args.model), force=args.force)


if __name__ == "__main__":
    main()
