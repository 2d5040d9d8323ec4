"""What the tables of a study say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.study.report import StudyCell, StudyDifference, StudyReport, study_report_path
from guard.files.yaml_file import validate
from guard.study import Origin, Study, StudyKind, StudyPoint

AUROCS = {
    "bag_of_words": {20: 0.70, 100: 0.80, 1000: 0.90},
    "lora": {20: 0.60, 100: 0.90, 1000: 0.905},
}


def report(kind: StudyKind = "curve") -> StudyReport:
    points = tuple(StudyPoint(rows=rows, seed=seed) for rows in (20, 100, 1000) for seed in (0, 1))
    origins: list[Origin] = ["real", "generated"] if kind == "transfer" else ["real"]
    cells, differences = [], []
    for origin in origins:
        for method, by_size in AUROCS.items():
            for rows, auroc in by_size.items():
                value = auroc + (0.05 if origin == "generated" else 0)
                cells.append(
                    StudyCell(
                        rows=rows,
                        origin=origin,
                        method=method,
                        auroc=value,
                        ci95=(value - 0.02, value + 0.02),
                        by_seed=(value, value),
                    )
                )
        for rows in (20, 100, 1000):
            difference = AUROCS["lora"][rows] - AUROCS["bag_of_words"][rows]
            differences.append(
                StudyDifference(
                    rows=rows,
                    origin=origin,
                    minuend="lora",
                    subtrahend="bag_of_words",
                    difference=difference,
                    ci95=(difference - 0.03, difference + 0.03),
                )
            )
    return StudyReport(
        study=Study(kind=kind, rule="toy", data="a.csv", labelled_for="doses", points=points),
        title="No toys.",
        model="tiny",
        tested=dict.fromkeys(origins, 300),
        violating=dict.fromkeys(origins, 100),
        cells=tuple(cells),
        differences=tuple(differences),
        commit="abc",
        hardware="none",
        versions={},
    )


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_a_curve_answers_how_many_rows_and_which_method() -> None:
    text = squeezed(report().as_markdown())
    assert "| LoRA | 0.600 [0.580, 0.620] | 0.900 [0.880, 0.920] | 0.905 [0.885, 0.925] |" in text
    assert "20 rows: bag of words is best." in text
    assert "100 rows: LoRA is best, clear of the bag of words (**+0.100" in text
    assert "1,000 rows: LoRA is best, not clear of the bag of words (+0.005" in text
    assert "- LoRA: from 100 rows on no more than 0.01 below its AUROC with 1,000." in text
    assert "bag of words: from 1,000 rows on" in text
    assert "generated" not in text


def test_rows_are_enough_where_all_larger_numbers_of_them_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not 20, after which the AUROC falls; more than at the end is no less."""
    for lora, enough in (({20: 0.8, 100: 0.7, 1000: 0.75}, "1,000"), ({20: 0.9, 100: 0.8}, "20")):
        monkeypatch.setitem(AUROCS, "lora", {1000: 0.75} | lora)
        assert f"- LoRA: from {enough} rows on no more than 0.01" in report().as_markdown()


def test_a_transfer_shows_the_flattering_figure_beside_the_honest_one() -> None:
    text = squeezed(report("transfer").as_markdown())
    assert "a.csv, labelled for doses" in text
    assert "300 generated (100 violate)" in text
    assert "| LoRA | 0.650 [0.630, 0.670] | 0.600 [0.580, 0.620] |" in text
    assert "| LoRA minus bag of words | **-0.100 [-0.130, -0.070]** | **-0.100" in text
    assert "is best" not in text


def test_only_a_difference_whose_interval_excludes_zero_is_clear() -> None:
    by_size = {difference.rows: difference.is_clear for difference in report().differences}
    assert by_size == {20: True, 100: True, 1000: False}


def test_a_report_reads_back_and_has_its_tables_beside_it(tmp_path: Path) -> None:
    path = study_report_path(tmp_path, "tiny")
    report().save(path)
    assert validate(json.loads(path.read_text()), StudyReport, where=path) == report()
    assert path.with_suffix(".md").read_text() == report().as_markdown() + "\n"


def test_a_figure_that_was_not_measured_is_no_figure() -> None:
    with pytest.raises(KeyError):
        report().cell(50, "lora")
