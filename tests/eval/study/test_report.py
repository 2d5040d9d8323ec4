"""What the tables and the picture of a study say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from pytest import MonkeyPatch

from eval.study.report import StudyFigure, StudyReport
from guard.files.yaml_file import validate
from guard.study import Origin, Study, StudyKind, StudyPoint

AUROCS = {
    "bag_of_words": {20: 0.70, 100: 0.80, 1000: 0.90},
    "lora": {20: 0.60, 100: 0.90, 1000: 0.905},
}


def report(kind: StudyKind = "curve") -> StudyReport:
    points = tuple(StudyPoint(rows=rows, seed=seed) for rows in (20, 100, 1000) for seed in (0, 1))
    origins: list[Origin] = ["real", "generated"] if kind == "transfer" else ["real"]
    figures: list[StudyFigure] = []

    def add(rows: int, origin: Origin, method: str, value: float, minus: str | None = None) -> None:
        of = {"rows": rows, "origin": origin, "method": method, "minus": minus}
        ci95 = (value - 0.02, value + 0.02)
        figures.append(StudyFigure(mean=value, ci95=ci95, by_seed=(value, value), **of))

    for origin in origins:
        flattery = 0.05 if origin == "generated" else 0.0
        for rows in (20, 100, 1000):
            words, lora = AUROCS["bag_of_words"][rows], AUROCS["lora"][rows]
            add(rows, origin, "bag_of_words", words + flattery)
            add(rows, origin, "lora", lora + flattery)
            add(rows, origin, "lora", lora - words, "bag_of_words")
    return StudyReport(
        study=Study(
            kind=kind, rule="toy", data="a.csv", path=None, labelled_for="doses", points=points
        ),
        model="tiny",
        tested=dict.fromkeys(origins, 300),
        violating=dict.fromkeys(origins, 100),
        figures=tuple(figures),
        commit="abc",
        hardware="none",
        versions={},
    )


def test_a_curve_has_every_method_and_difference_by_number_of_rows() -> None:
    """A difference is bold where its interval excludes zero, and there alone."""
    text = " ".join(report().as_markdown().split())
    assert "| LoRA | 0.600 [0.580, 0.620] | 0.900 [0.880, 0.920] | 0.905 [0.885, 0.925] |" in text
    assert "| LoRA minus bag of words | **-0.100 [-0.120, -0.080]** | **+0.100 [" in text
    assert "| +0.005 [-0.015, +0.025] |" in text
    assert "generated" not in text


def test_a_transfer_shows_the_flattering_figure_beside_the_honest_one() -> None:
    text = " ".join(report("transfer").as_markdown().split())
    assert "a.csv, labelled for doses" in text
    assert "300 generated (100 violate)" in text
    assert "| 20, on generated rows | 20 |" in text
    assert "| LoRA | 0.650 [0.630, 0.670] | 0.600 [0.580, 0.620] |" in text


@pytest.mark.parametrize(("kind", "dotted"), [("curve", 0), ("transfer", 2)])
def test_a_report_reads_back_and_has_its_tables_and_a_picture_of_every_method_beside_it(
    tmp_path: Path, monkeypatch: MonkeyPatch, kind: StudyKind, dotted: int
) -> None:
    """In a transfer the figure on generated rows is dotted."""
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **options: (drawn.append(figure), save(figure, path, **options)),
    )
    made, path = report(kind), tmp_path / "tiny.json"
    made.save(path)
    assert validate(json.loads(path.read_text()), StudyReport, where=path) == made
    assert path.with_suffix(".md").read_text() == made.as_markdown() + "\n"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["bag of words", "LoRA"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["20", "100", "1,000"]
    assert sum(line.get_linestyle() == ":" for line in axes.get_lines()) == dotted


def test_a_figure_that_was_not_measured_is_no_figure() -> None:
    with pytest.raises(KeyError):
        report().figure(50, "lora")
