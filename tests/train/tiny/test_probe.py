"""Which rows are probed, and figures that name the weights they are of."""

import json
import sys
from pathlib import Path

import pytest
import torch

from guard.errors import GuardError
from train.tiny import probe
from train.tiny.batch import labels_of
from train.tiny.distil import Distilled
from train.tiny.export import TrainingRecord, export
from train.tiny.student import Student, new_student
from train.tiny.teacher import FOLDER
from train.tiny.vocabulary import cut_vocabulary

pytestmark = pytest.mark.slow


def write(path: Path, count: int) -> Path:
    """Rows in pairs of a telling and a silent one, as the generator writes them."""
    texts = ("the secret word", "some other words")
    rows = [
        {"messages": [{"role": "user", "content": f"{texts[n % 2]} {n}"}], "label": 1 - n % 2}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_large_file_is_sampled_all_over_and_with_both_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 200)
    rows = probe.sample(path, 100)
    numbers = sorted(int(row["messages"][0]["content"].split()[-1]) for row in rows)
    assert len(set(numbers)) == 100
    assert 35 < sum(number >= 100 for number in numbers) < 65
    assert 35 < sum(row["label"] for row in rows) < 65
    assert probe.sample(path, 100) == rows
    assert len(probe.sample(path)) == 200


@pytest.mark.parametrize(
    ("row", "message"), [('{"label": 2}', "label must be 0 or 1"), ("{", "not valid JSON")]
)
def test_a_bad_row_is_named_by_line(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", 3)
    path.write_text(path.read_text() + "\n" + row + "\n")
    with pytest.raises(GuardError, match=rf"rows\.jsonl:5: {message}"):
        probe.sample(path)


def test_the_figures_reach_the_card_of_the_weights_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = cut_vocabulary(FOLDER, ["the secret word"], 1500)
    torch.manual_seed(0)
    student = Student(new_student(vocabulary), labels_of([]))
    base, figures = tmp_path / "base", tmp_path / "probe.json"

    def card() -> str:
        end = {"turn_cosine": 0.8, "verdict_accuracy": 0.75}
        record = TrainingRecord([], peak_lr=1e-3)
        export(Distilled(student, 3, end), vocabulary.tokenizer, base, record, figures)
        return (base / "README.md").read_text()

    assert "Not measured on these weights." in card()
    rows = write(tmp_path / "words.jsonl", 40)
    monkeypatch.setattr(
        sys, "argv", ["probe", str(rows), "--base", str(base), "--json", str(figures)]
    )
    probe.main()
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("| words | 40 | 1.000 | ")
    assert printed.replace("| words |", "| words |  | not stated |") in card()
    with torch.no_grad():
        student.model.model.norm.weight.mul_(2)
    assert "Not measured on these weights." in card()
