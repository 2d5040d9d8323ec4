"""Settings of a rule's aLoRA against each other: layers, ranks, learning rates, seeds. What has the
same layers is trained together on the same cached prefixes, so an adapter of the sweep costs its
suffixes, and a head's fit where it has one. The table is of the validation split; the test split
stays untouched.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from guard.calibration_rows import own_rows_decide
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import Rule, RuleTurn, check_labelling, load_rule
from train.examples import Row, Rows
from train.examples import load as load_rows
from train.job import Job
from train.run import see_one_gpu

GRIDS = HOME / "recipes" / "sweeps"
Values = Annotated[list[Any], Field(min_length=1)]


class SweepGrid(Strict):
    """What to try, each value a list: every combination, with every seed. `lora` and `trainer` are
    the recipe's arguments, `layers` and `rule_turn` its keys; an empty list: as in the recipe.
    """

    layers: list[int] = Field(default_factory=list)
    rule_turn: list[RuleTurn] = Field(default_factory=list)
    lora: dict[str, Values] = Field(default_factory=dict)
    trainer: dict[str, Values] = Field(default_factory=dict)
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)

    def combinations(self) -> Iterator[Combination]:
        """Every combination, the last argument's values in turn first."""
        names: list[tuple[str, str]] = []
        values: list[list[Any]] = []
        for key in ("layers", "rule_turn"):
            if getattr(self, key):
                names.append(("", key))
                values.append(list(getattr(self, key)))
        for section, arguments in (("lora", self.lora), ("trainer", self.trainer)):
            names += [(section, argument) for argument in arguments]
            values += arguments.values()
        for chosen in itertools.product(*values):
            settings = zip(names, chosen, strict=True)
            yield Combination(tuple((section, name, value) for (section, name), value in settings))


@dataclass(frozen=True)
class Combination:
    """Settings to try: (section of the recipe's method or "" for the recipe, argument, value)."""

    settings: tuple[tuple[str, str, Any], ...]

    @property
    def name(self) -> str:
        """`r=8 learning_rate=0.001`."""
        return " ".join(f"{name}={value}" for _, name, value in self.settings) or "as in the recipe"

    def recipe(self, recipe: Recipe) -> Recipe:
        """`recipe` with these settings for the aLoRA. `lora_alpha` keeps its ratio to `r` unless it
        is one of them.
        """
        sections: dict[str, dict[str, Any]] = {"": {}, "lora": {}, "trainer": {}}
        for section, name, value in self.settings:
            sections[section][name] = value
        method = recipe.settings(recipe.sharing_method)
        lora = method.lora | sections["lora"]
        is_scaled = {"r", "lora_alpha"} <= method.lora.keys()
        if is_scaled and "r" in sections["lora"] and "lora_alpha" not in sections["lora"]:
            lora["lora_alpha"] = method.lora["lora_alpha"] * lora["r"] / method.lora["r"]
        changed = method.model_copy(
            update={"lora": lora, "trainer": method.trainer | sections["trainer"]}
        )
        methods = recipe.methods | {recipe.sharing_method: changed}
        return recipe.model_copy(update={"methods": methods} | sections[""])


@dataclass(frozen=True)
class SweepRuns(Runs):
    """The layout of `runs/`, with a combination's adapters apart from those that are served."""

    combination: str = ""

    def adapter(self, model: str, rule: str, method: str, seed: int = 0) -> Path:
        """Scratch only: a sweep keeps figures, not adapters."""
        folder = self.root / "sweeps" / ".scratch" / model / rule / self.combination
        return folder / f"{method}-seed{seed}"


def sweep(
    rule: str, grid: Path, recipe: Recipe, *, runs: Runs | None = None, force: bool = False
) -> list[SweepPoint]:
    """Train the combinations that are not yet in the sweep's file, all together, and write its
    table. Raises GuardError for bad input first.
    """
    from train.adapter.load import check_adapter

    runs = runs or Runs()
    stated = load(grid, SweepGrid)
    work = _work(load_rule(rule), stated, recipe, runs)
    for _, job in work:
        check_adapter(job)
        job.read_inputs()
    rows = _rows([job for _, job in work])
    out = runs.root / "sweeps" / f"{recipe.name}-{rule}-{grid.stem}.json"
    done_points = {point.inputs: point for point in _read(out)}
    for _, job in work:
        job.claim()  # all of them, before anything of one is lost
    for _, job in work:
        if force:
            job.forget()
            done_points.pop(job.inputs, None)
    _write(out, done_points.values())  # an interrupted run goes on without `force`
    missing = [(combination, job) for combination, job in work if job.inputs not in done_points]
    print(f"{len(work)} adapters of {rule}, {len(missing)} of them to be trained", flush=True)
    for point in _trained(missing, rows):
        done_points[point.inputs] = point
        _write(out, done_points.values())  # kept if what follows is interrupted
    points: list[SweepPoint] = []
    for combination, job in work:
        if job.inputs in done_points:
            points.append(done_points[job.inputs].model_copy(update={"point": combination.name}))
        job.close_scratch()
        with contextlib.suppress(OSError):  # another sweep may have a seed of the combination
            job.folder.parent.rmdir()
    _write_table(table(points, len(stated.seeds)), out)
    return points


def _work(rule: Rule, grid: SweepGrid, recipe: Recipe, runs: Runs) -> list[tuple[Combination, Job]]:
    builder = PromptBuilder.of(recipe)
    work: list[tuple[Combination, Job]] = []
    for combination in grid.combinations():
        changed = combination.recipe(recipe)
        layout = SweepRuns(runs.root, combination=combination.name)
        for seed in grid.seeds:
            job = Job(rule, changed, recipe.sharing_method, seed, builder, layout)
            work.append((combination, job))
    return work


def _rows(jobs: Sequence[Job]) -> dict[RuleTurn, Rows]:
    check_labelling(jobs[0].data, jobs[0].rule)
    rows: dict[RuleTurn, Rows] = {}
    for job in jobs:
        turn = job.recipe.rule_turn
        if turn not in rows:
            rows[turn] = load_rows(job.data, job.rule, job.recipe, job.builder)
    return rows


def _read(file: Path) -> list[SweepPoint]:
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [SweepPoint.model_validate(point) for point in content]
    except ValueError as error:
        raise GuardError(
            "not the points of a sweep of this version",
            where=file,
            got=str(error).splitlines()[0],
            remedy="Delete it, and sweep again",
        ) from error


def _write(file: Path, points: Iterable[SweepPoint]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as part:
        content = json.dumps([point.model_dump() for point in points])
        part.write_text(content + "\n", encoding="utf-8")


def _write_table(text: str, points: Path) -> None:
    points.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nwritten to {points} and .md")


def _trained(
    work: Sequence[tuple[Combination, Job]], rows: Mapping[RuleTurn, Rows]
) -> Iterator[SweepPoint]:
    from train.prefix import trainer

    by_base: dict[int | None, list[tuple[Combination, Job]]] = {}
    for combination, job in work:
        by_base.setdefault(job.recipe.layers, []).append((combination, job))
    for of_base in by_base.values():
        jobs = [(job, rows[job.recipe.rule_turn]) for _, job in of_base]
        for (combination, job), trained in zip(of_base, trainer.fit(jobs), strict=True):
            try:
                if isinstance(trained, GuardError):
                    raise trained
                validation = rows[job.recipe.rule_turn].validation
                yield _point(combination, job, validation, trained.validation_logits)
            except GuardError as error:
                print(f"{combination.name}: {error}", flush=True)


def _point(
    combination: Combination, job: Job, validation: Sequence[Row], logits: Sequence[float]
) -> SweepPoint:
    from guard.calibrate import calibrate
    from train.calibration.validation import validation_metrics

    answered = list(zip(validation, logits, strict=True))
    is_generated = [row.is_generated for row in validation]
    if own_rows_decide([row.label for row in validation], is_generated, None):
        answered = [(row, logit) for row, logit in answered if not row.is_generated]
    logits = [logit for _, logit in answered]
    labels = [row.label for row, _ in answered]
    names = [row.group or row.id for row, _ in answered]
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    calibration = calibrate(logits, labels)
    metrics = validation_metrics(logits, labels, calibration)
    verdicts = [calibration.p_violation(logit) >= calibration.threshold for logit in logits]
    return SweepPoint(
        point=combination.name,
        layers=job.recipe.layers,
        rank=job.settings.lora.get("r", 8),
        seed=job.seed,
        inputs=job.inputs,
        accuracy=metrics["accuracy"],
        auroc=metrics["auroc"],
        nll=metrics["nll"],
        correct=[verdict == bool(label) for verdict, label in zip(verdicts, labels, strict=True)],
        groups=[number_of[name] for name in names],
    )


class SweepPoint(Strict):
    """One combination with one seed: metrics of the validation split. `point` names the
    combination, `inputs` is the fingerprint of its adapter, `correct` says which validation rows
    were judged right, `groups` which of them share a context, by number.
    """

    point: str
    layers: int | None = None  # of the recipe; None: all
    rank: int
    seed: int
    inputs: str
    accuracy: float
    auroc: float
    nll: float
    correct: list[bool]
    groups: list[int]

    @property
    def cost(self) -> tuple[float, int]:
        """What decides which of two settings is cheaper: the layers, then the rank."""
        return self.layers or np.inf, self.rank


def by_combination(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """The points of each combination, seeds together, in the grid's order."""
    combinations: dict[str, list[SweepPoint]] = {}
    for point in points:
        combinations.setdefault(point.point, []).append(point)
    return combinations


def advice(points: Sequence[SweepPoint]) -> tuple[str, float]:
    """The cheapest combination that is not worse than the best one beyond noise. And how much worse
    it is, in accuracy. Of several at one cost the best one stands for all. Noise is that of the
    validation rows: the 95 % interval of the mean paired difference of the rows' correctness, each
    averaged over the seeds; rows of one group stand or fall together.
    """
    correct: dict[str, np.ndarray] = {}
    by_cost: dict[tuple[float, int], list[str]] = {}
    for name, seeds in by_combination(points).items():
        correct[name] = np.mean([point.correct for point in seeds], axis=0)
        by_cost.setdefault(seeds[0].cost, []).append(name)
    best = max(correct, key=lambda name: correct[name].mean())
    for cost in sorted(by_cost):
        best_of_cost = max(by_cost[cost], key=lambda name: correct[name].mean())
        worse = correct[best] - correct[best_of_cost]
        if worse.mean() <= 1.96 * _standard_error(worse, points[0].groups):
            return best_of_cost, float(worse.mean())
    raise AssertionError("the best combination is not worse than itself")


def _standard_error(values: np.ndarray, groups: Sequence[int]) -> float:
    """The mean's standard error by the spread of the groups' sums; infinite for one group."""
    sums = np.bincount(groups, weights=values - values.mean())
    if len(sums) < 2:
        return np.inf
    return float(sums.std(ddof=1) * len(sums) ** 0.5 / len(values))


def table(points: Sequence[SweepPoint], seeds: int) -> str:
    """Markdown: a line for each combination, with mean and range over the `seeds` that are trained,
    and the cheapest of the good ones.
    """
    if not points:
        return "No adapter was trained; the errors stand above."
    lines = ["| settings | seeds | accuracy % | range | AUROC | nll |", "|---|---|---|---|---|---|"]
    complete: list[SweepPoint] = []
    for name, trained in by_combination(points).items():
        lines.append(_table_row(name, trained, seeds))
        if len(trained) == seeds:
            complete += trained
    return "\n".join([*lines, "", _conclusion(complete)])


def _table_row(name: str, trained: Sequence[SweepPoint], seeds: int) -> str:
    accuracy = [100 * point.accuracy for point in trained]
    auroc = sum(point.auroc for point in trained) / len(trained)
    nll = sum(point.nll for point in trained) / len(trained)
    spread = f"{np.mean(accuracy):.1f} | {min(accuracy):.1f} to {max(accuracy):.1f}"
    return f"| {name} | {len(trained)} of {seeds} | {spread} | {auroc:.3f} | {nll:.3f} |"


def _conclusion(complete: Sequence[SweepPoint]) -> str:
    if not complete:
        return "No settings were trained with all seeds; the errors stand above."
    name, worse = advice(complete)
    return (
        f"Fewest layers, then smallest rank, within noise of the best ({len(complete[0].correct)} "
        f"validation rows): **{name}**, {100 * worse:.1f} points below it."
    )


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.sweep.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rule", required=True, help="a rule in recipes/rules")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    grid = "what to try (default: recipes/sweeps/rank.yaml)"
    parser.add_argument("--grid", default=str(own_or_shipped(GRIDS / "rank.yaml")), help=grid)
    parser.add_argument("--force", action="store_true", help="train again what was trained before")
    args = parser.parse_args()
    see_one_gpu(os.environ)
    sweep(args.rule, Path(args.grid), load_recipe(args.model), force=args.force)


if __name__ == "__main__":
    main()
