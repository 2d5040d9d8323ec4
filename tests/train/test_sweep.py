"""Combinations of a grid become adapters of their own, trained together once and never served."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.files.yaml_file import load as load_yaml
from guard.home import ROOT
from guard.recipe import load_recipe
from guard.weights.predictions import read_predictions
from tests.train.conftest import RULE, MakeJob, calls_of, data, finish_at_once
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter
from train.job import Job
from train.prefix import trainer as shared_prefix
from train.sweep import Combination, SweepGrid, SweepRuns, sweep

pytestmark = pytest.mark.slow
SMALL = {"lora": {"r": [2, 4]}, "trainer": {"learning_rate": [1e-2]}, "seeds": [0, 1]}


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(RULE.model_dump(mode="json")))
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return file


def swept(job: Job, grid: Path, **more: Any) -> list[list[str]]:
    """The table's cells, by row."""
    file = sweep("toy", grid, job.recipe, runs=job.runs, rules=grid.parent, **more)
    return cells_of(file)


def cells_of(file: Path) -> list[list[str]]:
    lines = file.read_text().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b", "qwen3-4b"])
@pytest.mark.parametrize(
    "stated", sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_grids_fit_shipped_recipes(make_job: MakeJob, model: str, stated: Path) -> None:
    for combination in load_yaml(stated, SweepGrid).combinations():
        lora_config(replace(make_job("alora"), recipe=combination.recipe(load_recipe(model))))


def test_a_sweep_gives_what_each_adapter_gets_alone_and_trains_nothing_twice(
    make_job: MakeJob, grid: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Each on the first layers of its base that are asked for."""
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    job = make_job("alora", max_steps=4)
    grid.write_text("layers: [1, 2]\nrule_turn: [title, none]\n" + grid.read_text())
    parts = calls_of(monkeypatch, shared_prefix, "fit")
    rows = swept(job, grid)
    assert [len(part) for (part,) in parts] == [8, 8], "together, where the layers are the same"
    assert [row[:2] for row in rows][:2] == [
        ["layers=1 rule_turn=title r=2 learning_rate=0.01", "2 of 2"],
        ["layers=1 rule_turn=title r=4 learning_rate=0.01", "2 of 2"],
    ]
    assert len(rows) == 8

    settings = {("", "layers"): 1, ("", "rule_turn"): "none", ("lora", "r"): 4}
    combination = Combination(settings | {("trainer", "learning_rate"): 1e-2})
    runs = SweepRuns(job.runs.root, combination.name)
    of_sweep = replace(job, recipe=combination.recipe(job.recipe), seed=1, runs=runs)
    assert of_sweep.settings.lora["lora_alpha"] == 8.0  # 32 at r=16
    kept = read_predictions(of_sweep.folder, "validation", "")
    alone = replace(of_sweep, runs=SweepRuns(job.runs.root, "alone"))
    validation = data(alone).validation
    (fitted,) = shared_prefix.fit([(alone, data(alone))])
    assert isinstance(fitted, TrainedAdapter)
    expected = fitted.validation_logits[: len(validation)]
    assert [kept[row.id] for row in validation] == pytest.approx(list(expected), abs=1e-4)

    assert not job.folder.exists() and not (job.runs.root / "registry").exists()
    monkeypatch.setattr(shared_prefix, "fit", None)
    assert swept(job, grid) == rows


def test_what_was_trained_stays_when_a_sweep_is_stopped_and_force_trains_it_again(
    make_job: MakeJob, grid: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    job, asked = make_job("alora"), []

    def fit(work: Any) -> Any:
        """In place of training: two adapters, an error, and where one is left an interrupt."""
        asked.append([(job.settings.lora["r"], job.seed) for job, _ in work])
        for number, (job, _) in enumerate(work):
            if number == 2:
                yield GuardError("the loss is NaN")
                if len(work) == 4:
                    raise KeyboardInterrupt
            else:
                finish_at_once(job)
                yield TrainedAdapter(None, job)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_prefix, "fit", fit)
    monkeypatch.setattr("train.run.finish", lambda *_: {"accuracy": 0.5} | METRICS)
    file = job.runs.root / "sweeps" / "toy-toy-small.md"
    with pytest.raises(KeyboardInterrupt):
        swept(job, grid)
    assert "r=4 learning_rate=0.01: the loss is NaN" in capsys.readouterr().out
    (first, second) = cells_of(file)
    assert first[1:6] == ["2 of 2", "100.0", "100.0 to 100.0", "89.3 to 100.0", "1.000"]
    assert second[1:] == ["0 of 2", "-", "-", "-", "-", "-"]
    with pytest.raises(KeyboardInterrupt):
        swept(job, grid, force=True)
    shutil.rmtree(file.parent / "r=2 learning_rate=0.01" / "toy" / "toy" / "alora-seed1")
    with pytest.raises(GuardError, match=r"not trained: toy alora seed 1, r=4 lea"):
        swept(job, grid)
    assert asked == [[(2, 0), (2, 1), (4, 0), (4, 1)]] * 2 + [[(2, 1), (4, 0), (4, 1)]]


METRICS = {"accuracy_ci95": [0.4, 0.6], "auroc": 0.5, "n": 32}


def test_a_bad_grid_stops_the_sweep_before_training(make_job: MakeJob, grid: Path) -> None:
    job = make_job("alora")
    for stated, told in (
        ("lora: {r: [4096, 2]}", "max_lora_rank"),
        ("ranks: [1, 2]", r"small\.yaml.*ranks"),
        ("lora: {r: []}", r"small\.yaml.*lora\.r.*at least 1"),
    ):
        grid.write_text(stated)
        with pytest.raises(GuardError, match=told):
            swept(job, grid)
    assert not (job.runs.root / "sweeps").exists()
