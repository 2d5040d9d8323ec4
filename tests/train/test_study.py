"""Every point of a study is trained as a rule is, in its own folder, and once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pytest import CaptureFixture

from guard.conversation.example import SPLITS
from guard.errors import GuardError
from guard.layout import fingerprint, is_current
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.study import Study, StudyPoint, point_runs
from guard.weights.card import load_card
from guard.weights.predictions import read_predictions
from tests.train.conftest import RULE, MakeJob, encoder_recipe, write_toy_data
from train.study import train_study

POINTS = tuple(StudyPoint(rows=rows, seed=seed) for rows, seed in ((16, 0), (32, 1)))


OF_USER = RULE.model_copy(update={"judged": "user"})


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    # Too few rows to choose by that rate.
    rule = OF_USER.model_dump(mode="json") | {"max_fpr": 0.001}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(rule))
    return tmp_path


def write_study(folder: Path) -> None:
    study = Study(kind="curve", rule="toy", data=None, path=None, labelled_for=None, points=POINTS)
    study.save(folder)
    for point in POINTS:
        write_toy_data(point_runs(folder, point).data("toy"), n_train=point.rows, n_other=8)


@pytest.mark.slow
def test_each_point_is_trained_on_its_own_rows_with_its_own_seed_and_only_once(
    make_job: MakeJob,
    toy_encoder: Path,
    rules: Path,
    tmp_path: Path,
    capsys: CaptureFixture[str],
) -> None:
    """Those of an encoder read its prompts."""
    encoder = encoder_recipe(toy_encoder, max_steps=1).model_copy(update={"name": "encoder"})
    recipes, folder = [make_job(max_steps=2).recipe, encoder], tmp_path / "study"
    write_study(folder)
    train_study(folder, recipes, rules=rules)
    up_to_date: list[str] = []
    for recipe in recipes:
        prompt_hash = prompt_builder(recipe).hash
        for point in POINTS:
            runs = point_runs(folder, point)
            data_hash = fingerprint(*(runs.data("toy") / f"{split}.jsonl" for split in SPLITS))
            for method in recipe.methods:
                seed = point.seed * METHODS[method].is_seeded
                trained = runs.adapter(recipe.name, "toy", method, seed)
                card = load_card(trained)
                assert (card.data_hash, card.seed, card.max_fpr) == (data_hash, seed, None)
                assert (card.prompt_hash, card.reads) == (prompt_hash, recipe.reads(OF_USER))
                assert len(read_predictions(trained, "test", "")) == 8
                up_to_date.append(f"toy {method} seed {seed}, {point.rows} rows: up to date")
    capsys.readouterr()
    train_study(folder, recipes, rules=rules)
    assert capsys.readouterr().out.splitlines() == up_to_date


@pytest.mark.slow
def test_a_point_of_bad_rows_leaves_the_others(
    make_job: MakeJob, rules: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    job, folder = make_job(max_steps=1), tmp_path / "study"
    write_study(folder)
    (point_runs(folder, POINTS[0]).data("toy") / "test.jsonl").unlink()
    with pytest.raises(GuardError, match="not trained: rows-16-seed-0 on toy"):
        train_study(folder, [job.recipe.only("lora")], rules=rules)
    assert "rows-16-seed-0 on toy: " in capsys.readouterr().out
    done = replace(job, runs=point_runs(folder, POINTS[1]), seed=POINTS[1].seed)
    assert is_current(done.folder, done.inputs)


def test_a_bad_recipe_is_refused_first(make_job: MakeJob, rules: Path, tmp_path: Path) -> None:
    bad, folder = make_job(num_epochs=1), tmp_path / "study"
    write_study(folder)
    good = make_job(max_steps=1).recipe.model_copy(update={"name": "good"})
    with pytest.raises(GuardError, match="unknown key 'num_epochs'"):
        train_study(folder, [good, bad.recipe], rules=rules)
    assert not point_runs(folder, POINTS[0]).adapter("good", "toy", "lora", 0).exists()
    with pytest.raises(GuardError, match="no such study"):
        train_study(tmp_path / "nowhere", [good], rules=rules)
