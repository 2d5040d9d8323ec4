"""A Python file of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.own_module import imported


def test_a_file_is_imported_with_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 5")
    (tmp_path / "mine.py").write_text("from beside_it import VALUE")
    assert imported(tmp_path / "mine.py", "a benchmark").VALUE == 5


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("def", "a benchmark cannot be imported: SyntaxError"),
        (
            "import nothing_of_this_name",
            "a benchmark cannot be imported: ModuleNotFoundError: .*Correct it",
        ),
        ("1 / 0", "a benchmark cannot be imported: ZeroDivisionError"),
        (None, "no such file. Name a benchmark"),
    ],
)
def test_what_fails_is_told_in_one_line(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(GuardError, match=f"mine.py: {problem}"):
        imported(tmp_path / "mine.py", "a benchmark")
