"""What the tables and the picture of a study say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from eval.study.report import StudyFigure, StudyReport
from guard.files.yaml_file import validate
from guard.study import Origin, Study, StudyKind, StudyPoint

AUROCS = {
    "bag_of_words": {20: 0.70, 100: 0.80, 1000: 0.90},
    "lora": {20: 0.60, 100: 0.90, 1000: 0.905},
}


def report(kind: StudyKind) -> StudyReport:
    points = tuple(StudyPoint(rows=rows, seed=seed) for rows in (20, 100, 1000) for seed in (0, 1))
    origins: list[Origin] = ["real", "generated"] if kind == "transfer" else ["real"]
    figures: list[StudyFigure] = []

    def add(value: float, method: str, minus: str | None = None) -> None:
        of = {"rows": rows, "origin": origin, "method": method, "minus": minus}
        ci95 = (value - 0.02, value + 0.02)
        figures.append(StudyFigure(mean=value, ci95=ci95, by_seed=(value, value), **of))

    for origin, rows in itertools.product(origins, (20, 100, 1000)):
        flattery = 0.05 if origin == "generated" else 0.0
        words, lora = AUROCS["bag_of_words"][rows], AUROCS["lora"][rows]
        add(words + flattery, "bag_of_words")
        add(lora + flattery, "lora")
        add(lora - words, "lora", "bag_of_words")
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


CURVE = (
    "| LoRA | 0.600 [0.580, 0.620] | 0.900 [0.880, 0.920] | 0.905 [0.885, 0.925] |",
    # A difference is bold where its interval excludes zero, and there alone.
    "| LoRA minus bag of words | **-0.100 [-0.120, -0.080]** | **+0.100 [",
    "| +0.005 [-0.015, +0.025] |",
)
TRANSFER = (  # the flattering figure stands beside the honest one
    "a.csv, labelled for doses",
    "300 generated (100 violate)",
    "| 20, on generated rows | 20 |",
    "| LoRA | 0.650 [0.630, 0.670] | 0.600 [0.580, 0.620] |",
)


@pytest.mark.parametrize(("kind", "told"), [("curve", CURVE), ("transfer", TRANSFER)])
def test_a_report_reads_back_and_has_its_table_and_picture_beside_it(
    tmp_path: Path, kind: StudyKind, told: tuple[str, ...]
) -> None:
    made, path = report(kind), tmp_path / "tiny.json"
    made.save(path)
    assert validate(json.loads(path.read_text()), StudyReport, where=path) == made
    text = " ".join(path.with_suffix(".md").read_text().split())
    assert [line for line in told if line not in text] == []
    assert ("generated" in text) == (kind == "transfer")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
