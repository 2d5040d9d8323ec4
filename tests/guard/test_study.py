"""Where a study's points lie, and that its file reads back."""

import argparse
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.study import (
    STUDY,
    Study,
    StudyPoint,
    add_recipe_arguments,
    add_study_arguments,
    load_study,
    named_recipes,
    point_runs,
    study_folder,
)

POINTS = tuple(StudyPoint(rows=rows, seed=seed) for rows in (50, 20) for seed in (0, 3))
STUDY_OF_FOUR = Study(
    kind="curve", rule="toy", data=None, path=None, labelled_for=None, points=POINTS
)


def test_a_study_reads_back_and_a_missing_or_broken_one_names_what_writes_it(
    tmp_path: Path,
) -> None:
    STUDY_OF_FOUR.save(tmp_path / "new")
    assert load_study(tmp_path / "new") == STUDY_OF_FOUR
    assert STUDY_OF_FOUR.sizes == [20, 50]
    assert [point.seed for point in STUDY_OF_FOUR.of_size(20)] == [0, 3]
    with pytest.raises(GuardError, match=r"no such study.*make transfer"):
        load_study(tmp_path)
    (tmp_path / STUDY).write_text("{")
    with pytest.raises(GuardError, match="not valid JSON"):
        load_study(tmp_path)
    (tmp_path / STUDY).write_text('{"kind": "race"}')
    with pytest.raises(GuardError, match="kind"):
        load_study(tmp_path)


def test_every_point_and_every_study_has_a_folder_of_its_own(tmp_path: Path) -> None:
    data = {point_runs(tmp_path, point).data("toy") for point in POINTS}
    assert len(data) == 4
    assert tmp_path / "rows-20-seed-3" / "data" / "toy" in data
    folders = {
        study_folder(tmp_path, "curve", "toy", None),
        study_folder(tmp_path, "curve", "toy", Path("a.jsonl.gz")),
        study_folder(tmp_path, "curve", "toy", Path("b.csv")),
        study_folder(tmp_path, "curve", "other", None),
        study_folder(tmp_path, "transfer", "toy", Path("a.jsonl.gz")),
    }
    assert len(folders) == 5
    assert tmp_path / "transfer" / "toy-a" in folders


def test_a_study_is_named_in_the_same_words_and_of_all_methods_of_a_recipe_or_of_one() -> None:
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    named = parser.parse_args(["transfer", "--rule", "toy", "--data", "a.csv"])
    assert (named.kind, named.rule, named.data) == ("transfer", "toy", Path("a.csv"))
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    (tiny,) = named_recipes(parser.parse_args([]))
    assert list(tiny.methods) == ["lora", "alora", "head"]
    (minilm,) = named_recipes(parser.parse_args(["--model", "minilm", "--method", "head"]))
    assert (minilm.name, list(minilm.methods)) == ("minilm", ["head"])
    both = named_recipes(parser.parse_args(["--model", "tiny, minilm", "--method", "lora"]))
    assert [(recipe.name, list(recipe.methods)) for recipe in both] == [
        ("tiny", ["lora"]),
        ("minilm", ["lora"]),
    ]
    with pytest.raises(GuardError, match=r"lists no such method.*alora"):
        named_recipes(parser.parse_args(["--model", "minilm", "--method", "alora"]))
