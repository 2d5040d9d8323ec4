from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.answer_file import AnswerFile


@dataclass(frozen=True)
class Row:
    key: str
    text: str


def test_kept_rows_are_found_by_a_later_run_until_they_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    AnswerFile(path, Row).add([Row("a", "line\u2028separator and\nbreak"), Row("b", "2")])
    AnswerFile(path, Row).add([Row("b", "3")])
    later = AnswerFile(path, Row)
    assert later.get("a") == Row("a", "line\u2028separator and\nbreak")
    assert later.get("b") == Row("b", "3")
    assert later.get("c") is None
    file = AnswerFile(tmp_path / "rows.jsonl", Row)
    file.add([Row("a", "1")])
    file.forget()
    assert file.get("a") is None
    assert AnswerFile(file.path, Row).get("a") is None


def test_a_row_torn_by_a_kill_is_dropped_and_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    AnswerFile(path, Row).add([Row("a", "1"), Row("b", "2")])
    path.write_bytes(path.read_bytes()[:-3])
    file = AnswerFile(path, Row)
    assert file.get("b") is None
    file.add([Row("c", "3")])
    assert AnswerFile(path, Row).get("c") == Row("c", "3")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "text": "1"}\n{"key": "a"}\n')
    with pytest.raises(GuardError, match=r"rows\.jsonl:2"):
        AnswerFile(path, Row)


def test_answers_are_paid_for_by_one_command_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    first, second = AnswerFile(path, Row), AnswerFile(path, Row)
    with first.held():
        first.add([Row("a", "1")])
        with pytest.raises(GuardError, match="another command is asking"), second.held():
            pass
    assert second.get("a") is None
    with second.held():
        assert second.get("a") == Row("a", "1")  # what the first has got meanwhile
