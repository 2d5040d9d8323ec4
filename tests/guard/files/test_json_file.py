"""A JSON file is read, or refused with its name, however it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.strict_json import MAX_BYTES, load_json


def test_a_value_is_read_up_to_the_largest_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": ["ü"]}', encoding="utf-8")
    assert load_json(path, remedy="none") == {"a": ["ü"]}
    path.write_text("1" + " " * (MAX_BYTES - 1))
    assert load_json(path, remedy="none") == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b'"\xff"', "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"1" * 5000, "not valid JSON"),  # more digits than Python reads
        (b"1" + b" " * MAX_BYTES, f"more than {MAX_BYTES} bytes"),
        (None, "cannot be read"),
    ],
)
def test_what_is_none_is_refused_with_its_name_and_what_to_do(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GuardError, match=problem) as refused:
        load_json(path, remedy="Write it anew")
    assert str(path) in str(refused.value) and "Write it anew" in str(refused.value)
