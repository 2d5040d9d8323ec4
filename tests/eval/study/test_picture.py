"""The picture has a line with intervals for every method."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from eval.study.picture import draw_study
from guard.study import StudyKind
from tests.eval.study.test_report import report


@pytest.mark.parametrize(("kind", "dotted"), [("curve", 0), ("transfer", 2)])
def test_each_method_is_drawn_once_and_a_transfer_s_generated_figure_dotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: StudyKind, dotted: int
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **options: (drawn.append(figure), save(figure, path, **options)),
    )
    draw_study(report(kind), tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["bag of words", "LoRA"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["20", "100", "1,000"]
    assert sum(line.get_linestyle() == ":" for line in axes.get_lines()) == dotted
