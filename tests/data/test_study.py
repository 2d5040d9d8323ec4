"""What a point is trained on, and that nothing of it is tested on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data.generator.generate import Counts
from data.sources import generated
from data.splits import refuse_leaks
from data.study import ALL_ROWS, StudyRequest, _limited, build_study, drawn, row_counts
from guard.conversation import example
from guard.errors import GuardError
from guard.layout import Runs
from guard.rule import load_rule
from guard.study import StudyPoint, point_runs, study_folder
from tests.data.own_rows import random_rows, written

SMALL = Counts(train=16, validation=8, test=0)


def write_rows(path: Path, count: int = 200, every: int = 3, **fields: object) -> Path:
    """Rows of random words, a third of which violates, two of a group."""
    rows = []
    for number, row in enumerate(random_rows(count)):
        row |= {"label": int(number % every == 0), "id": f"r{number}", "group": f"g{number // 2}"}
        rows.append(row | fields)
    return Path(written(path, rows))


def bare(identity: str, label: int, split: example.Split) -> example.Example:
    """A row of a group of its own."""
    said = (example.Message("user", f"row {identity}"),)
    return example.Example(identity, "medical_advice", said, label, split, "", identity)


def request(tmp_path: Path, **changes: object) -> StudyRequest:
    asked = StudyRequest(
        rule=load_rule("medical_advice"),
        data=str(tmp_path / "rows.jsonl"),
        sizes=(20, 40, ALL_ROWS),
        seeds=(0, 1),
        test_rows=1000,
        generated=SMALL,
        runs=Runs(tmp_path / "runs"),
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def folder_of(asked: StudyRequest, point: StudyPoint) -> Path:
    folder = study_folder(asked.runs.root, asked.rule.id, asked.data)
    return point_runs(folder, point).data(asked.rule.id)


def mixed(tmp_path: Path, **changes: object) -> StudyRequest:
    return request(tmp_path, data=f"{example.GENERATOR_AND}{tmp_path / 'rows.jsonl'}", **changes)


def rows_of(asked: StudyRequest, point: StudyPoint) -> dict[str, list[example.Example]]:
    return {
        split: example.read_examples(folder_of(asked, point) / f"{split}.jsonl")
        for split in example.SPLITS
    }


def test_points_share_test_rows_and_a_smaller_draw_is_part_of_a_larger_one(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = request(tmp_path)
    study = build_study(asked)
    most = study.sizes[-1]
    assert study.sizes == [20, 40, most] and 100 < most < 140
    tests, ids = [], {}
    for point in study.points:
        rows = rows_of(asked, point)
        drawn_rows = [*rows["train"], *rows["validation"]]
        assert len(drawn_rows) == point.rows
        refuse_leaks([*drawn_rows, *rows["test"]])
        tests.append(rows["test"])
        ids[point.rows, point.seed] = {(row.split, row.id) for row in drawn_rows}
    assert all(test == tests[0] for test in tests)
    assert len(tests[0]) == 200 - most
    assert ids[20, 0] < ids[40, 0] < ids[most, 0] == ids[most, 1]
    assert ids[20, 0] != ids[20, 1]


def pool(train: int = 100, validation: int = 100, violating: int = 50) -> list[example.Example]:
    """So many rows of each split, of which the first violate."""
    rows = [bare(f"t{number}", int(number < violating), "train") for number in range(train)]
    for number in range(validation):
        rows.append(bare(f"v{number}", int(number < violating), "validation"))
    return rows


def test_a_draw_keeps_the_shares_of_labels_and_of_validation_and_some_of_either() -> None:
    half = drawn(pool(), 40, seed=0)
    assert sum(row.label for row in half) == 20
    assert sum(row.split == "validation" for row in half) == 8
    rare = drawn(pool(violating=3), 20, seed=0)
    for split in ("train", "validation"):
        labels = [row.label for row in rare if row.split == split]
        assert min(labels.count(0), labels.count(1)) >= example.FEWEST_ROWS
    assert len(rare) == 20
    assert drawn(pool(), 0, seed=0) == []


@pytest.mark.parametrize(("train", "validation"), [(100, 10), (20, 90)])
def test_where_a_split_has_few_the_other_gives_more(train: int, validation: int) -> None:
    for rows in (40, 80, 100):
        few = pool(train, validation, violating=min(train, validation) // 2)
        assert len(drawn(few, rows, seed=0)) == rows


def test_beside_generated_rows_a_point_may_have_none_of_the_file_and_tests_on_it(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = mixed(tmp_path, sizes=(0, 20), seeds=(0,))
    origins = {}
    for point in build_study(asked).points:
        for split, rows in rows_of(asked, point).items():
            is_generated = [row.is_generated for row in rows]
            origins[point.rows, split] = (is_generated.count(True), is_generated.count(False))
    assert origins[0, "train"] == (16, 0) and origins[0, "validation"] == (8, 0)
    assert origins[20, "train"] == (16, 16) and origins[20, "validation"] == (8, 4)
    assert origins[0, "test"] == origins[20, "test"]
    generated_rows, real = origins[0, "test"]
    assert generated_rows == 0 and real > 50


def test_the_same_request_writes_the_same_bytes_and_another_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = mixed(tmp_path, sizes=(20,), seeds=(0,))
    study = build_study(asked)
    file = folder_of(asked, study.points[0]) / "train.jsonl"
    before = file.read_bytes()
    assert build_study(asked) == study and file.read_bytes() == before
    monkeypatch.chdir(tmp_path)
    assert folder_of(replace(asked, data="generator+rows.jsonl"), study.points[0]) == file.parent
    (tmp_path / "2025").mkdir()
    own = str(write_rows(tmp_path / "2025" / "rows.jsonl", 190))
    for data in (own, f"{example.GENERATOR_AND}{own}"):
        build_study(replace(asked, data=data))
    assert file.read_bytes() == before


def test_a_row_that_is_a_generated_one_is_refused(tmp_path: Path) -> None:
    asked = mixed(tmp_path, sizes=(0, 20), seeds=(0,))
    copied = generated(asked.rule, asked.generated, 0)[0]
    path = write_rows(tmp_path / "rows.jsonl")
    turns = [{"role": turn.role, "content": turn.content} for turn in copied.messages]
    row = {"messages": turns, "label": copied.label, "id": "mine"}
    path.write_text(f"{path.read_text()}{json.dumps(row)}\n")
    with pytest.raises(GuardError, match=r"are generated ones.*real/mine.*Remove these rows"):
        build_study(asked)
    assert not asked.runs.root.exists()


def test_too_few_rows_to_draw_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"rows\.jsonl: no such file"):
        build_study(request(tmp_path))
    write_rows(tmp_path / "rows.jsonl")
    assert row_counts("100,all,20") == (100, ALL_ROWS, 20)
    for asked, size in ((request, 1), (request, 7), (mixed, 5)):
        with pytest.raises(GuardError, match=rf"too few rows to draw.*got {size}"):
            build_study(asked(tmp_path, sizes=(size, 20)))


def test_of_a_file_alone_no_rows_leave_the_test_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = request(tmp_path, sizes=(0, 20), seeds=(0,))
    study = build_study(asked)
    none, some = (rows_of(asked, point) for point in study.points)
    assert none["test"] == some["test"] and not none["train"] and not none["validation"]
    assert [study.is_day_zero(point) for point in study.points] == [True, False]
    assert not build_study(mixed(tmp_path, sizes=(0,))).is_day_zero(study.points[0])


def test_no_more_test_rows_are_kept_than_are_asked_for(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = request(tmp_path, test_rows=30, sizes=(20,), seeds=(0,))
    tests = rows_of(asked, build_study(asked).points[0])["test"]
    assert len(tests) == 30
    assert set(Counter(row.group for row in tests).values()) == {2}
    # One group that is larger is tested on whole.
    rows = [replace(bare(str(number), number % 2, "test"), group="all") for number in range(8)]
    assert _limited(rows, 5) == rows


def test_test_rows_that_rank_nothing_are_refused(tmp_path: Path) -> None:
    """A few violating rows, which none of the test rows that are drawn are."""
    write_rows(tmp_path / "rows.jsonl", 400, every=20)
    asked = request(tmp_path, sizes=(20,), seeds=(0,), test_rows=4)
    with pytest.raises(GuardError, match=r"at least 2 rows of each label.*that violate"):
        build_study(asked)
    assert not asked.runs.root.exists()
