"""Combinations of a grid become adapters of their own, trained together once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch

from guard.calibrate import calibrate
from guard.conversation.example import read_examples, write_examples
from guard.errors import GuardError
from guard.files.yaml_file import load as load_yaml
from guard.home import ROOT
from guard.recipe import load_recipe
from tests.train.conftest import RULE, MakeJob, data, with_own_rows
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter
from train.examples import Rows
from train.job import Job
from train.prefix import trainer as shared_prefix
from train.sweep import run as sweep
from train.sweep.run import (
    Combination,
    SweepGrid,
    SweepPoint,
    SweepRuns,
    advice,
    table,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.setattr(sweep, "load_rule", lambda name: RULE)
    file = tmp_path / "small.yaml"
    stated = {"lora": {"r": [2, 4]}, "trainer": {"learning_rate": [1e-2]}, "seeds": [0, 1]}
    file.write_text(yaml.safe_dump(stated))
    return file


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b", "qwen3-4b"])
@pytest.mark.parametrize(
    "stated", sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_grids_fit_shipped_recipes(make_job: MakeJob, model: str, stated: Path) -> None:
    for combination in load_yaml(stated, SweepGrid).combinations():
        lora_config(replace(make_job("alora"), recipe=combination.recipe(load_recipe(model))))


def test_a_sweep_gives_what_each_adapter_gets_alone_and_trains_nothing_twice(
    make_job: MakeJob, grid: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Any
) -> None:
    """Each on the first layers of its base that are asked for."""
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    job = make_job("alora", max_steps=4)
    grid.write_text("layers: [1, 2]\nrule_turn: [title, none]\n" + grid.read_text())
    points = sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    of_layers = 2 * [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert [(point.rank, point.seed) for point in points] == 2 * of_layers
    assert [point.layers for point in points] == 8 * [1] + 8 * [2]
    by_cost = sorted(points, key=lambda point: point.cost)
    assert [point.rank for point in by_cost[::4]] == [2, 4, 2, 4]

    folder = job.runs.root / "sweeps"
    assert not [path for path in (folder / ".scratch").rglob("*") if path.is_file()]
    of_recipe = (("", "layers", 1), ("", "rule_turn", "none"))
    settings = (*of_recipe, ("lora", "r", 4), ("trainer", "learning_rate", 1e-2))
    recipe = Combination(settings).recipe(job.recipe)
    alone = replace(job, recipe=recipe, seed=1, runs=SweepRuns(job.runs.root, "alone"))
    assert alone.settings.lora["lora_alpha"] == 8.0  # 32 at r=16
    rows = data(alone)
    (fitted,) = shared_prefix.fit([(alone, rows)])
    assert isinstance(fitted, TrainedAdapter)
    calibration = calibrate(fitted.validation_logits, [row.label for row in rows.validation])
    correct: list[bool] = []
    for logit, row in zip(fitted.validation_logits, rows.validation, strict=True):
        is_flagged = calibration.p_violation(logit) >= calibration.threshold
        correct.append(is_flagged == bool(row.label))
    assert points[7].correct == correct

    written = {path.name for path in folder.iterdir()}
    assert {"toy-toy-small.json", "toy-toy-small.md"} <= written
    assert not job.folder.exists(), "the served adapter is not touched"
    monkeypatch.setattr(shared_prefix, "fit", None)
    assert sweep.sweep("toy", grid, job.recipe, runs=job.runs) == points
    assert "16 adapters of toy, 0 of them to be trained" in capsys.readouterr().out


class Told:
    """In place of `fit`: yields what it is told, and notes what it was asked for."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = answers, []  # type: ignore[var-annotated]

    def __call__(self, jobs: Sequence[tuple[Job, Rows]]) -> Iterator[object]:
        self.asked = [(job.settings.lora["r"], job.seed) for job, _ in jobs]
        for answer in self.answers:
            if isinstance(answer, KeyboardInterrupt):
                raise answer
            yield answer


def of_logits(logits: list[float]) -> TrainedAdapter:
    return TrainedAdapter(None, None, logits)  # type: ignore[arg-type]


GOOD = of_logits([1.0, -1.0, 2.0, -0.5] * 8)


def test_own_rows_compare(make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch) -> None:
    """Where only the generated rows are told apart, none is any good."""
    job = make_job("alora")
    with_own_rows(job, 20)
    file = job.data / "validation.jsonl"
    examples = read_examples(file)
    examples[12:14] = [replace(row, group="pair") for row in examples[12:14]]
    write_examples(file, examples)
    logits = [2.0 * row.label - 1 for row in examples[:12]]
    logits += [1.0 - 2 * row.label for row in examples[12:]]
    monkeypatch.setattr(shared_prefix, "fit", Told(*[of_logits(logits)] * 4))
    for point in sweep.sweep("toy", grid, job.recipe, runs=job.runs):
        assert len(point.correct) == 20 and point.auroc == 0.0
        assert point.groups == [0, 0, *range(1, 19)]  # of rows 12 and 13, and each other


def interrupted_at(job: Job, combination: str) -> Path:
    """A checkpoint of the combination's seed 1, as a sweep leaves it that is stopped."""
    scratch = job.runs.root / "sweeps" / ".scratch" / "toy" / "toy"
    checkpoint = scratch / combination / ".alora-seed1.part" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    return checkpoint


def test_what_sweeps_keep_and_drop(make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch) -> None:
    job = make_job("alora")
    monkeypatch.setattr(shared_prefix, "fit", Told(GOOD, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    left = interrupted_at(job, "r=2 learning_rate=0.01")

    rest = Told(GOOD, GOOD, GOOD)
    monkeypatch.setattr(shared_prefix, "fit", rest)
    grid.write_text(grid.read_text() + "\n")
    assert len(sweep.sweep("toy", grid, job.recipe, runs=job.runs)) == 4
    assert rest.asked == [(2, 1), (4, 0), (4, 1)]

    # The recipe's learning rate is the same.
    small = yaml.safe_dump({"lora": {"r": [2, 4]}, "seeds": [0, 1]})
    grid.write_text(small)
    monkeypatch.setattr(shared_prefix, "fit", None)
    points = sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert {point.point for point in points} == {"r=2", "r=4"}

    grid.write_text(yaml.safe_dump({"lora": {"r": [8]}, "seeds": [0]}))
    monkeypatch.setattr(shared_prefix, "fit", Told(GOOD))
    (other,) = sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    grid.write_text(small)
    forced = Told(GOOD, KeyboardInterrupt())
    monkeypatch.setattr(shared_prefix, "fit", forced)
    left = interrupted_at(job, "r=2")
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep("toy", grid, job.recipe, runs=job.runs, force=True)
    assert len(forced.asked) == 4 and not left.exists()
    kept = json.loads((job.runs.root / "sweeps" / "toy-toy-small.json").read_text())
    assert [point["inputs"] for point in kept] == [other.inputs, points[0].inputs]


def test_leftovers_of_finished_adapters_are_cleared(
    make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch
) -> None:
    """First, points of another version are named."""
    job = make_job("alora")
    points = job.runs.root / "sweeps" / f"toy-toy-{grid.stem}.json"
    points.parent.mkdir(parents=True)
    for content in ("not JSON", '[{"adapter": 1}]'):
        points.write_text(content)
        with pytest.raises(GuardError, match=rf"{points}: not the points .*Delete it, and sweep"):
            sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    points.unlink()
    monkeypatch.setattr(shared_prefix, "fit", Told(GOOD, GOOD, GOOD, GOOD))
    left = interrupted_at(job, "r=2 learning_rate=0.01")
    of_another = left.parents[1] / ".alora-seed7.part"
    of_another.mkdir()
    sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert not left.exists() and of_another.exists()


def test_a_point_that_diverges_leaves_the_others(
    make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    not_finite, lost = of_logits([float("nan")] * 32), GuardError("the loss is NaN")
    monkeypatch.setattr(shared_prefix, "fit", Told(GOOD, not_finite, lost, GOOD))
    job = make_job("alora")
    points = sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert [(point.rank, point.seed) for point in points] == [(2, 0), (4, 1)]
    told = capsys.readouterr().out
    assert "r=2 learning_rate=0.01: verdict logits are not finite" in told
    assert "r=4 learning_rate=0.01: the loss is NaN" in told
    assert "| 1 of 2 |" in told


def test_a_bad_grid_stops_the_sweep_before_training(make_job: MakeJob, grid: Path) -> None:
    job = make_job("alora")
    for stated, told in (
        ("lora: {r: [2, 4096]}", "max_lora_rank"),
        ("ranks: [1, 2]", r"small\.yaml.*ranks"),
        ("lora: {r: []}", r"small\.yaml.*lora\.r.*at least 1"),
    ):
        grid.write_text(stated)
        with pytest.raises(GuardError, match=told):
            sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert not (job.runs.root / "sweeps").exists()


def sweep_point(name: str, rank: int, seed: int, right: int, group_rows: int = 1) -> SweepPoint:
    rows = {"correct": [row < right for row in range(100)]}
    rows["groups"] = [row // group_rows for row in range(100)]
    figures = {"accuracy": right / 100, "auroc": 0.5, "nll": 0.7}
    return SweepPoint(point=name, rank=rank, seed=seed, inputs=f"{name}{seed}", **figures, **rows)


@pytest.mark.parametrize(
    ("right", "group_rows", "advised"),
    [
        # 2 of 100 rows less is noise, 10 and 40 are not.
        ({"r=4": 50, "r=8": 88, "r=16": 80, "r=32": 90}, 1, "r=8"),
        # Rows that stand or fall together are less certain: ten are two groups, or a tenth of one.
        ({"r=4": 80, "r=8": 90}, 1, "r=8"),
        ({"r=4": 80, "r=8": 90}, 5, "r=4"),
        ({"r=4": 80, "r=8": 90}, 100, "r=4"),
        # Each rank stands by its best point.
        ({"r=4 lr=1": 60, "r=4 lr=2": 89, "r=8 lr=1": 90}, 1, "r=4 lr=2"),
    ],
)
def test_the_smallest_rank_within_noise_of_the_best_is_advised(
    right: dict[str, int], group_rows: int, advised: str
) -> None:
    points: list[SweepPoint] = []
    for name, count in right.items():
        rank = int(name.split()[0].removeprefix("r="))
        points += [sweep_point(name, rank, seed, count, group_rows) for seed in (0, 1)]
    best = max(right.values())
    assert advice(points) == (advised, pytest.approx((best - right[advised]) / 100))
    told = table(points, 2)
    assert f"100 validation rows): **{advised}**, {best - right[advised]}.0 points below it" in told
    share = right[advised]
    assert f"| {advised} | 2 of 2 | {share}.0 | {share}.0 to {share}.0 |" in told


def test_a_point_without_all_its_seeds_is_told_so_and_not_advised() -> None:
    points = [sweep_point("r=4", 4, 1, 99), *(sweep_point("r=8", 8, seed, 90) for seed in (0, 1))]
    told = table(points, 2)
    assert "| r=4 | 1 of 2 |" in told
    assert "**r=8**, 0.0 points below it" in told
    assert "No settings were trained with all seeds" in table(points[:1], 2)
