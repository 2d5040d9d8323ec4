"""What a point is trained on, and that nothing of it is tested on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data.generator.generate import Counts
from data.sources import generated
from data.splits import refuse_leaks
from data.study import ALL_ROWS, StudyRequest, _limited, build_study, drawn, row_counts
from guard.conversation.example import (
    FEWEST_ROWS,
    GENERATOR,
    SPLITS,
    Example,
    Message,
    Split,
    read_examples,
    write_examples,
)
from guard.errors import GuardError
from guard.layout import Runs
from guard.rule import MANIFEST_KEY, labelling, load_rule
from guard.study import ORIGIN, Study, StudyPoint, point_runs, study_folder
from tests.data.own_rows import random_rows, written

SMALL = Counts(train=16, validation=8, test=8)


def write_rows(path: Path, count: int = 200, every: int = 3, **fields: object) -> Path:
    """Rows of random words, a third of which violates, two of a group."""
    rows = []
    for number, row in enumerate(random_rows(count)):
        row |= {"label": int(number % every == 0), "id": f"r{number}", "group": f"g{number // 2}"}
        rows.append(row | fields)
    return Path(written(path, rows))


def bare(identity: str, label: int, split: Split) -> Example:
    """A row of a group of its own."""
    said = (Message("user", f"row {identity}"),)
    return Example(identity, "medical_advice", said, label, split, "", identity)


def request(tmp_path: Path, **changes: object) -> StudyRequest:
    asked = StudyRequest(
        kind="curve",
        rule=load_rule("medical_advice"),
        data=tmp_path / "rows.jsonl",
        sizes=(20, 40, ALL_ROWS),
        seeds=(0, 1),
        test_rows=1000,
        generated=SMALL,
        runs=Runs(tmp_path / "runs"),
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def folder_of(asked: StudyRequest, point: StudyPoint) -> Path:
    folder = study_folder(asked.runs.root, asked.kind, asked.rule.id, asked.data)
    return point_runs(folder, point).data(asked.rule.id)


def rows_of(asked: StudyRequest, point: StudyPoint) -> dict[str, list[Example]]:
    return {split: read_examples(folder_of(asked, point) / f"{split}.jsonl") for split in SPLITS}


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


def pool(train: int = 100, validation: int = 100, violating: int = 50) -> list[Example]:
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
        assert min(labels.count(0), labels.count(1)) >= FEWEST_ROWS
    assert len(rare) == 20
    assert drawn(pool(), 0, seed=0) == []


@pytest.mark.parametrize(("train", "validation"), [(100, 10), (20, 90)])
def test_where_a_split_has_few_the_other_gives_more(train: int, validation: int) -> None:
    for rows in (40, 80, 100):
        few = pool(train, validation, violating=min(train, validation) // 2)
        assert len(drawn(few, rows, seed=0)) == rows


def test_a_transfer_without_real_rows_is_trained_on_generated_ones_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = request(tmp_path, kind="transfer", sizes=(0, 20), seeds=(0,))
    origins = {}
    for point in build_study(asked).points:
        for split, rows in rows_of(asked, point).items():
            of_rows = [row.meta[ORIGIN] for row in rows]
            origins[point.rows, split] = (of_rows.count("generated"), of_rows.count("real"))
    assert origins[0, "train"] == (16, 0) and origins[0, "validation"] == (8, 0)
    assert origins[20, "train"] == (16, 16) and origins[20, "validation"] == (8, 4)
    assert origins[0, "test"] == origins[20, "test"]
    generated, real = origins[0, "test"]
    assert generated == 8 and real > 50


def test_nothing_is_written_again_until_something_changed_is_gone_or_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = request(tmp_path, sizes=(20,), seeds=(0,))
    study = build_study(asked)
    file = folder_of(asked, study.points[0]) / "train.jsonl"
    changed_ns, before = file.stat().st_mtime_ns, file.read_bytes()
    assert build_study(asked) == study
    assert file.stat().st_mtime_ns == changed_ns
    shutil.rmtree(file.parent)
    assert build_study(asked) == study
    assert file.read_bytes() == before
    write_rows(tmp_path / "rows.jsonl", 190)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(Study, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        build_study(asked)
    assert file.read_bytes() != before
    # Though the file of rows is what it was before: points of two files may lie there.
    write_rows(tmp_path / "rows.jsonl")
    build_study(asked)
    assert file.read_bytes() == before


def test_another_file_whose_name_begins_alike_does_not_overwrite_a_study(tmp_path: Path) -> None:
    for name in ("real.v1.jsonl", "real.v2.jsonl"):
        write_rows(tmp_path / name)
    asked = request(tmp_path, data=tmp_path / "real.v1.jsonl", sizes=(20,), seeds=(0,))
    study = build_study(asked)
    with pytest.raises(GuardError, match=r"another file.*real\.v1\.jsonl, not .*real\.v2\.jsonl"):
        build_study(replace(asked, data=tmp_path / "real.v2.jsonl"))
    assert build_study(asked) == study
    elsewhere = tmp_path / "2025" / "real.v1.jsonl"
    elsewhere.parent.mkdir()
    write_rows(elsewhere, 190)
    with pytest.raises(GuardError, match=r"another file.*not .*2025/real\.v1\.jsonl"):
        build_study(replace(asked, data=elsewhere))
    (tmp_path / "real.v1.jsonl").rename(elsewhere)  # the file itself, which was moved
    assert build_study(replace(asked, data=elsewhere)).points == study.points


def test_without_a_file_a_curve_draws_from_the_rule_s_own_splits(tmp_path: Path) -> None:
    asked = request(tmp_path, data=None, sizes=(20,), seeds=(0,))

    def write(generated: int) -> None:
        for split in SPLITS:
            rows = [bare(f"{split}{number}", number % 2, split) for number in range(40)]
            rows[:generated] = [replace(row, source=GENERATOR) for row in rows[:generated]]
            write_examples(asked.own_rows / f"{split}.jsonl", rows)

    write(generated=0)
    manifest = asked.own_rows / "manifest.json"
    manifest.write_text(json.dumps({MANIFEST_KEY: labelling(asked.rule)}))
    (point,) = build_study(asked).points
    rows = rows_of(asked, point)
    assert [row.id for row in rows["test"]] == [f"real/test{number}" for number in range(40)]
    assert all(row.id.startswith("real/train") for row in rows["train"])
    assert all(row.id.startswith("real/validation") for row in rows["validation"])
    changed = asked.rule.model_copy(update={"turns": "last"})
    with pytest.raises(GuardError, match=r'were made for turns: "any"; the rule says turns: "last'):
        build_study(replace(asked, rule=changed))
    with pytest.raises(GuardError, match=r"tested on real rows.*DATA=FILE"):
        build_study(replace(asked, kind="transfer"))
    # Points with more and less of either would say nothing about how many are needed.
    write(generated=20)
    with pytest.raises(GuardError, match=r"are generated, others are your own.*DATA=FILE"):
        build_study(asked)


def test_a_row_of_a_transfer_that_is_a_generated_one_is_refused(tmp_path: Path) -> None:
    asked = request(tmp_path, kind="transfer", sizes=(0, 20), seeds=(0,))
    copied = generated(asked.rule, asked.generated, 0)[0]
    path = write_rows(tmp_path / "rows.jsonl")
    turns = [{"role": turn.role, "content": turn.content} for turn in copied.messages]
    row = {"messages": turns, "label": copied.label, "id": "mine"}
    path.write_text(f"{path.read_text()}{json.dumps(row)}\n")
    with pytest.raises(GuardError, match=r"are generated ones.*real/mine.*Remove these rows"):
        build_study(asked)
    assert not asked.runs.root.exists()


def test_too_few_rows_to_draw_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"no such file.*\.jsonl"):
        build_study(request(tmp_path))
    write_rows(tmp_path / "rows.jsonl")
    assert row_counts("100,all,20") == (100, ALL_ROWS, 20)
    for kind, size in (("curve", 0), ("curve", 7), ("transfer", 5)):
        with pytest.raises(GuardError, match=rf"too few rows to draw.*got {size}"):
            build_study(request(tmp_path, kind=kind, sizes=(size, 20)))


def test_no_more_test_rows_are_kept_than_are_asked_for(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    asked = request(tmp_path, test_rows=30, sizes=(20,), seeds=(0,))
    tests = rows_of(asked, build_study(asked).points[0])["test"]
    assert len(tests) == 30
    assert set(Counter(row.group for row in tests).values()) == {2}
    # One group that is larger is tested on whole.
    rows = [replace(bare(str(number), number % 2, "test"), group="all") for number in range(8)]
    assert _limited(rows, 5) == tuple(rows)


def test_test_rows_that_rank_nothing_are_refused(tmp_path: Path) -> None:
    """A few violating rows, which none of the test rows that are drawn are."""
    write_rows(tmp_path / "rows.jsonl", 400, every=20)
    for kind in ("curve", "transfer"):
        asked = request(tmp_path, kind=kind, sizes=(20,), seeds=(0,), test_rows=4)
        with pytest.raises(GuardError, match=r"at least 2 rows of each label.*that violate"):
            build_study(asked)
        assert not asked.runs.root.exists()
