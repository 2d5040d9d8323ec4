"""Every point of a study is trained as a rule is, in its own folder, and once."""

from __future__ import annotations

import contextlib
import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pytest import CaptureFixture

from guard.conversation.example import SPLITS
from guard.errors import GuardError
from guard.layout import fingerprint, is_current
from guard.prompt.encoder import EncoderPromptBuilder
from guard.study import Study, StudyPoint, point_runs
from guard.weights.card import load_card
from guard.weights.predictions import read_predictions
from tests.train.conftest import RULE, MakeJob, encoder_recipe, write_toy_data
from train.job import LOCK, Job
from train.study import train_study

POINTS = tuple(StudyPoint(rows=rows, seed=seed) for rows, seed in ((16, 0), (32, 1)))


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    rule = RULE.model_dump(mode="json") | {"max_fpr": 0.001}  # too few rows to choose by it
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(rule))
    return tmp_path


def write_study(folder: Path) -> None:
    study = Study(kind="curve", rule="toy", data=None, path=None, labelled_for=None, points=POINTS)
    study.save(folder)
    for point in POINTS:
        write_toy_data(point_runs(folder, point).data("toy"), n_train=point.rows, n_other=8)


def job_of(job: Job, folder: Path, point: StudyPoint, method: str) -> Job:
    """The job that trains a method at a point."""
    return replace(job, runs=point_runs(folder, point), method=method, seed=point.seed)


@pytest.mark.slow
def test_each_point_is_trained_on_its_own_rows_with_its_own_seed_and_only_once(
    make_job: MakeJob, rules: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    job, folder = make_job(max_steps=2), tmp_path / "study"
    write_study(folder)
    train_study(folder, [job.recipe], rules=rules)
    for point in POINTS:
        data = point_runs(folder, point).data("toy")
        for method in job.recipe.methods:
            trained = job_of(job, folder, point, method)
            card = load_card(trained.folder)
            assert card.data_hash == fingerprint(*(data / f"{split}.jsonl" for split in SPLITS))
            assert (card.seed, card.max_fpr) == (point.seed, None)
            assert len(read_predictions(trained.folder, "test", "")) == 8
    assert "toy alora seed 1, 32 rows: training" in capsys.readouterr().out.replace(
        "toy alora seed 0, 16 rows, ", ""
    )
    train_study(folder, [job.recipe], rules=rules)
    assert capsys.readouterr().out.splitlines() == [
        f"toy {method} seed {point.seed}, {point.rows} rows: up to date"
        for point in POINTS
        for method in job.recipe.methods
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "bad rows"])
def test_a_failed_point_leaves_the_others(
    make_job: MakeJob, rules: Path, tmp_path: Path, capsys: CaptureFixture[str], is_taken: bool
) -> None:
    job, folder = make_job(max_steps=1), tmp_path / "study"
    write_study(folder)
    first = job_of(job, folder, POINTS[0], "lora")
    told = "not trained: rows-16-seed-0 on toy"
    with contextlib.ExitStack() as held:
        if is_taken:
            told = "not trained: toy lora seed 0, 16 rows"
            first.scratch.mkdir(parents=True)
            lock = held.enter_context((first.scratch / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            (first.data / "test.jsonl").unlink()
        with pytest.raises(GuardError, match=told):
            train_study(folder, [job.recipe.only("lora")], rules=rules)
    assert is_taken or "rows-16-seed-0 on toy: " in capsys.readouterr().out
    done = job_of(job, folder, POINTS[1], "lora")
    assert is_current(done.folder, done.inputs)


def test_a_bad_recipe_is_refused_first(make_job: MakeJob, rules: Path, tmp_path: Path) -> None:
    bad, folder = make_job(num_epochs=1), tmp_path / "study"
    write_study(folder)
    good = make_job(max_steps=1).recipe.model_copy(update={"name": "good"})
    for recipes in ([bad.recipe], [good, bad.recipe]):
        with pytest.raises(GuardError, match="unknown key 'num_epochs'"):
            train_study(folder, recipes, rules=rules)
    assert not point_runs(folder, POINTS[0]).adapter("good", "toy", "lora", 0).exists()
    with pytest.raises(GuardError, match="no such study"):
        train_study(tmp_path / "nowhere", [good], rules=rules)


@pytest.mark.slow
def test_the_points_of_an_encoder_read_its_prompts(
    toy_encoder: Path,
    rules: Path,
    tmp_path: Path,
) -> None:
    folder, recipe = tmp_path / "study", encoder_recipe(toy_encoder, max_steps=1)
    rule = RULE.model_dump(mode="json") | {"judged": "user"}
    (rules / "toy.yaml").write_text(yaml.safe_dump(rule))
    write_study(folder)
    train_study(folder, [recipe], rules=rules)
    builder = EncoderPromptBuilder.of(recipe)
    for point in POINTS:
        runs = point_runs(folder, point)
        for method, seed in (("lora", point.seed), ("head", 0)):
            card = load_card(runs.adapter(recipe.name, "toy", method, seed))
            assert (card.prompt_hash, card.reads) == (builder.hash, "user")
