"""Where output lies, whether it is current, which methods' weights and which studies are in it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from guard.conversation.example import SPLITS, Example, Message, write_examples
from guard.errors import GuardError
from guard.layout import Runs, fingerprint, is_current, mark_current, read_splits
from guard.method import METHODS, method_named
from guard.study import (
    STUDY,
    Study,
    StudyPoint,
    add_recipe_arguments,
    load_study,
    named_recipes,
    point_runs,
)


def test_weights_of_a_seed_have_a_folder_and_examples_are_read_by_split(tmp_path: Path) -> None:
    folder = Runs(Path("runs")).adapter("tiny", "pii_leak", "lora", seed=2)
    assert folder == Path("runs/tiny/pii_leak/lora-seed2")
    for split in SPLITS:
        said = (Message("user", split),)
        row = Example(split, "toy", said, label=0, split=split, source="toy", group=split)
        write_examples(tmp_path / f"{split}.jsonl", [row])
    read = read_splits(tmp_path)
    assert {split: rows[0].id for split, rows in read.items()} == {split: split for split in SPLITS}
    (tmp_path / "validation.jsonl").unlink()
    with pytest.raises(GuardError, match=r"validation\.jsonl: no such file"):
        read_splits(tmp_path)


def test_a_fingerprint_keeps_its_inputs_apart_and_a_stage_is_current_for_its_own(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("same")
    other.write_text("same")
    assert fingerprint(one, {"a": 1, "b": 2}) == fingerprint(other, {"b": 2, "a": 1})
    other.write_text("different")
    assert fingerprint(one) != fingerprint(other)
    kept_apart = [("a", "b"), ("b", "a"), ("ab",), (["a", "b"],), (), (None,), (1, 2), (12,), (1,)]
    assert len({fingerprint(*inputs) for inputs in [*kept_apart, ("1",)]}) == 10
    assert not is_current(tmp_path, "abc")
    mark_current(tmp_path, "abc")
    assert is_current(tmp_path, "abc") and not is_current(tmp_path, "abcd")
    stamp = (tmp_path / "stage.json").read_text()
    for cut in range(len(stamp)):
        (tmp_path / "stage.json").write_text(stamp[:cut])
        assert not is_current(tmp_path, "abc")


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    assert method_named("alora") is METHODS["alora"]
    with pytest.raises(GuardError, match=r"no such method \(got alorra\). Did you mean 'alora'"):
        method_named("alorra")


def test_a_study_reads_back_and_a_missing_or_broken_one_names_what_writes_it(
    tmp_path: Path,
) -> None:
    points = tuple(StudyPoint(rows=rows, seed=seed) for rows in (50, 20) for seed in (0, 3))
    names = {"rule": "toy", "data": "/rows.csv"}
    study = Study.model_validate(names | {"points": points})
    study.save(tmp_path / "new")
    assert load_study(tmp_path / "new") == study
    assert (study.sizes, [point.seed for point in study.of_size(20)]) == ([20, 50], [0, 3])
    data = {point_runs(tmp_path, point).data("toy") for point in points}
    assert len(data) == 4 and tmp_path / "rows-20-seed-3" / "data" / "toy" in data
    with pytest.raises(GuardError, match=r"no such study.*make curve"):
        load_study(tmp_path)
    (tmp_path / STUDY).write_text('{"rule": 7}')
    with pytest.raises(GuardError, match="points"):
        load_study(tmp_path)


def test_recipes_are_named_with_all_of_their_methods_or_with_one() -> None:
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    (tiny,) = named_recipes(parser.parse_args([]))
    assert list(tiny.methods) == ["lora", "alora", "head"]
    both = named_recipes(parser.parse_args(["--model", "tiny, minilm", "--method", "lora"]))
    found = [(recipe.name, list(recipe.methods)) for recipe in both]
    assert found == [("tiny", ["lora"]), ("minilm", ["lora"])]
    with pytest.raises(GuardError, match=r"lists no such method.*alora"):
        named_recipes(parser.parse_args(["--model", "minilm", "--method", "alora"]))
