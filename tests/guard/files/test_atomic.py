"""Files that are whole or not there, that one process holds at a time, and that keep answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.answer_file import AnswerFile
from guard.files.atomic import atomic_write, locked, save_figures


def test_files_are_written_whole_or_stay_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with atomic_write(file) as part:
        part.write_text("first")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as part:
        part.write_text("sec")
        raise KeyboardInterrupt
    assert file.read_text() == "first"
    save_figures(tmp_path / "speed.json", '{"ms": 1}', "| ms |")
    assert (tmp_path / "speed.json").read_text() == '{"ms": 1}\n'
    assert (tmp_path / "speed.md").read_text() == "| ms |\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_is_held_until_it_is_closed_and_anew_if_its_holder_deletes_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "folder" / "lock"
    (tmp_path / "link").symlink_to(path)
    with locked(path, "busy"):
        path.write_text("kept")
        for name in (path, tmp_path / "link"):
            with pytest.raises(GuardError, match=r"folder/lock: busy\. Wait for it, or end it"):
                locked(name, "busy")
    deleted = locked(path, "busy")
    assert path.read_text() == "kept"
    path.unlink()  # else two processes could hold two files of one name
    with locked(path, "busy"), pytest.raises(GuardError, match="busy"):
        locked(path, "busy")
    deleted.lock.release()
    (tmp_path / "file").touch()
    with pytest.raises(GuardError, match=r"the folder cannot be held: .*can be written to"):
        locked(tmp_path / "file" / "lock", "busy")


@dataclass(frozen=True)
class Row:
    key: str
    text: str


def test_kept_rows_are_found_by_a_later_run_until_they_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    AnswerFile(path, Row).add([Row("a", "line\u2028separator and\nbreak"), Row("b", "2")])
    AnswerFile(path, Row).add([Row("b", "3")])
    later = AnswerFile(path, Row)
    assert later.rows() == [Row("a", "line\u2028separator and\nbreak"), Row("b", "3")]
    assert later.get("c") is None
    later.forget()
    assert later.get("a") is AnswerFile(path, Row).get("a") is None


def test_a_row_torn_by_a_kill_is_dropped_and_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    AnswerFile(path, Row).add([Row("a", "1"), Row("b", "2")])
    path.write_bytes(path.read_bytes()[:-3])
    file = AnswerFile(path, Row)
    assert file.get("b") is None
    file.add([Row("c", "3")])
    assert AnswerFile(path, Row).get("c") == Row("c", "3")
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
