"""The raw logits beside a rule's weights: they come back bit for bit, or the file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.weights.predictions import PREDICTIONS, read_predictions, write_predictions


def test_logits_come_back_by_split_bit_for_bit_or_the_missing_file_is_refused(
    tmp_path: Path,
) -> None:
    logits = {"a": 0.1 + 0.2, "b": -17.0, "c\u2028d": 1e-300}
    rows = [(row_id, "test", logit) for row_id, logit in logits.items()]
    write_predictions(tmp_path, [*rows, ("a", "validation", 3.5)])
    assert read_predictions(tmp_path, "test", "") == logits
    assert read_predictions(tmp_path, "validation", "") == {"a": 3.5}
    assert read_predictions(tmp_path, "train", "") == {}
    with pytest.raises(GuardError, match=r"predictions.jsonl: no such file. Train it again"):
        read_predictions(tmp_path / "none", "test", "Train it again")


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "b", "split": "test", "logit": NaN}',
        '{"id": "b", "split": "test", "logit": Infinity}',
        '{"id": "b", "split": "test", "logit": null}',
        '{"id": "b", "split": "test"}',
        '{"id": "b", "split": "te',
        "[]",
    ],
)
def test_a_line_that_is_no_prediction_is_named(tmp_path: Path, line: str) -> None:
    write_predictions(tmp_path, [("a", "test", 1.0)])
    path = tmp_path / PREDICTIONS
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(GuardError, match=r"predictions.jsonl:2: not a prediction.*Train it again"):
        read_predictions(tmp_path, "test", "Train it again")
