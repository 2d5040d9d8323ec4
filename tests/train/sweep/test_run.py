"""Combinations of a grid become adapters of their own, trained together once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch
from sklearn.metrics import roc_auc_score

from guard.calibrate import calibrate
from guard.conversation.example import GENERATOR, read_examples, write_examples
from guard.errors import GuardError
from guard.files.yaml_file import load as load_yaml
from guard.home import ROOT
from guard.recipe import load_recipe
from tests.train.conftest import RULE, MakeJob, data
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter
from train.examples import Rows
from train.job import Job
from train.prefix import trainer as shared_prefix
from train.run import VISIBLE_GPUS
from train.sweep import run as sweep
from train.sweep.run import (
    Combination,
    SweepGrid,
    SweepPoint,
    SweepRuns,
    advice,
    by_combination,
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


def test_a_sweep_over_layers_trains_each_on_its_own_base(
    make_job: MakeJob, grid: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    job = make_job("alora", max_steps=4)
    grid.write_text(yaml.safe_dump({"layers": [1, 2], "lora": {"r": [4, 2]}, "seeds": [0]}))
    points = sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert [(point.layers, point.rank) for point in points] == [(1, 4), (1, 2), (2, 4), (2, 2)]
    assert [point.point for point in sorted(points, key=lambda point: point.cost)] == [
        "layers=1 r=2",
        "layers=1 r=4",
        "layers=2 r=2",
        "layers=2 r=4",
    ]
    recipe = Combination((("", "layers", 1), ("lora", "r", 2))).recipe(job.recipe)
    alone = replace(job, recipe=recipe, runs=SweepRuns(job.runs.root, "alone"))
    (fitted,) = shared_prefix.fit([(alone, data(alone))])
    assert isinstance(fitted, TrainedAdapter)
    labels = [row.label for row in data(alone).validation]
    alone_auroc = roc_auc_score(labels, fitted.validation_logits)
    assert points[1].auroc == pytest.approx(alone_auroc, abs=1e-4)


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b", "qwen3-4b"])
@pytest.mark.parametrize(
    "stated", sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_grids_fit_shipped_recipes(make_job: MakeJob, model: str, stated: Path) -> None:
    for combination in load_yaml(stated, SweepGrid).combinations():
        lora_config(replace(make_job("alora"), recipe=combination.recipe(load_recipe(model))))


def test_a_sweep_gives_what_each_adapter_gets_alone_and_trains_nothing_twice(
    make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    job = make_job("alora", max_steps=4)
    grid.write_text("rule_turn: [title, none]\n" + grid.read_text())
    points = sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert [(point.rank, point.seed) for point in points] == 2 * [(2, 0), (2, 1), (4, 0), (4, 1)]

    folder = job.runs.root / "sweeps"
    assert not [path for path in (folder / ".scratch").rglob("*") if path.is_file()]
    settings = (("", "rule_turn", "none"), ("lora", "r", 4), ("trainer", "learning_rate", 1e-2))
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
    assert "8 adapters of toy, 0 of them to be trained" in capsys.readouterr().out


class Told:
    """In place of `fit`: yields what it is told, and notes what it was asked for."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = answers, []  # type: ignore[var-annotated]

    def __call__(self, jobs: Sequence[tuple[Job, Rows]]) -> Iterator[object]:
        self.asked = [(job.settings.lora["r"], job.seed) for job, _ in jobs]
        for answer in self.answers:
            if isinstance(answer, KeyboardInterrupt):
                raise answer
            if isinstance(answer, list):
                yield TrainedAdapter(None, None, answer)  # type: ignore[arg-type]
            else:
                yield answer


GOOD = [1.0, -1.0, 2.0, -0.5] * 8


def test_own_rows_compare(make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch) -> None:
    """Where only the generated rows are told apart, none is any good."""
    job = make_job("alora")
    file = job.data / "validation.jsonl"
    examples = read_examples(file)
    generated = [replace(row, source=GENERATOR) for row in examples[:12]]
    own = [replace(row, group="pair") for row in examples[12:14]] + examples[14:]
    write_examples(file, [*generated, *own])
    logits = [2.0 * row.label - 1 for row in generated]
    logits += [1.0 - 2 * row.label for row in examples[12:]]
    monkeypatch.setattr(shared_prefix, "fit", Told(logits, logits, logits, logits))
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


def test_leftovers_are_cleared(make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch) -> None:
    """Those that an interrupted sweep left of finished adapters; first, points of another version
    are named.
    """
    job = make_job("alora")
    points = job.runs.root / "sweeps" / f"toy-toy-{grid.stem}.json"
    points.parent.mkdir(parents=True)
    for content in ("not JSON", '[{"adapter": 1}]'):
        points.write_text(content)
        with pytest.raises(GuardError, match=rf"{points}: not the points .*Delete it, and sweep"):
            sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    points.unlink()
    monkeypatch.setattr(shared_prefix, "fit", Told(GOOD, GOOD, GOOD, GOOD))
    sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    left = interrupted_at(job, "r=2 learning_rate=0.01")
    of_another = left.parents[1] / ".alora-seed7.part"
    of_another.mkdir()
    sweep.sweep("toy", grid, job.recipe, runs=job.runs)
    assert not left.exists()
    assert of_another.exists()


def test_a_point_that_diverges_leaves_the_others(
    make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        shared_prefix, "fit", Told(GOOD, [float("nan")] * 32, GuardError("the loss is NaN"), GOOD)
    )
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


def test_of_several_gpus_a_sweep_sees_the_first(monkeypatch: MonkeyPatch) -> None:
    """Transformers would spread the batches of one trainer over all that are visible."""
    monkeypatch.setenv(VISIBLE_GPUS, "2,3")
    monkeypatch.setattr(sys, "argv", ["train.sweep.run", "--rule", "medical_advice"])
    seen = []
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: seen.append(os.environ[VISIBLE_GPUS]))
    sweep.main()
    assert seen == ["2"]


def sweep_point(name: str, rank: int, seed: int, right: int, group_rows: int = 1) -> SweepPoint:
    rows = {"correct": [row < right for row in range(100)]}
    rows["groups"] = [row // group_rows for row in range(100)]
    figures = {"accuracy": right / 100, "auroc": 0.5, "nll": 0.7}
    return SweepPoint(point=name, rank=rank, seed=seed, inputs=f"{name}{seed}", **figures, **rows)


def test_the_smallest_rank_within_noise_of_the_best_is_advised() -> None:
    ranks = {4: 50, 8: 88, 16: 80, 32: 90}  # 2 of 100 rows less is noise, 10 and 40 are not
    points = []
    for rank, right in ranks.items():
        points += [sweep_point(f"r={rank}", rank, seed, right) for seed in (0, 1)]
    assert advice(points) == ("r=8", pytest.approx(0.02))
    told = table(points, 2)
    assert "100 validation rows): **r=8**, 2.0 points below it" in told
    assert "| r=8 | 2 of 2 | 88.0 | 88.0 to 88.0 |" in told


@pytest.mark.parametrize(("group_rows", "rank"), [(1, 8), (5, 4), (100, 4)])
def test_rows_that_stand_or_fall_together_are_less_certain(group_rows: int, rank: int) -> None:
    """Ten rows less are beyond chance, unless they are two groups of twenty, or all are one."""
    points = [sweep_point(f"r={r}", r, 0, right, group_rows) for r, right in ((4, 80), (8, 90))]
    assert advice(points)[0] == f"r={rank}"


def test_a_point_without_all_its_seeds_is_told_so_and_not_advised() -> None:
    points = [sweep_point("r=4", 4, 1, 99), *(sweep_point("r=8", 8, seed, 90) for seed in (0, 1))]
    told = table(points, 2)
    assert "| r=4 | 1 of 2 |" in told
    assert "**r=8**, 0.0 points below it" in told
    assert "No settings were trained with all seeds" in table(points[:1], 2)


def test_each_rank_stands_by_its_best_point() -> None:
    tried = (("r=4 lr=1", 4, 60), ("r=4 lr=2", 4, 89), ("r=8 lr=1", 8, 90))
    points = [sweep_point(name, rank, 0, right) for name, rank, right in tried]
    assert advice(points)[0] == "r=4 lr=2"


def test_combinations_keep_the_order_of_the_grid_with_their_seeds_together() -> None:
    points = [sweep_point("b", 1, 0, 3), sweep_point("a", 2, 0, 4), sweep_point("b", 1, 1, 5)]
    assert by_combination(points) == {"b": [points[0], points[2]], "a": [points[1]]}
