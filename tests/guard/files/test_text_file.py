"""Files that are something else than their names say, and text that is not UTF-8."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.text_file import read_text

TEXT = "text,label\r\ncafé,1\r\n"


def test_text_is_read_without_its_mark_and_unpacked(tmp_path: Path) -> None:
    for name, content, text in (
        ("a.csv", TEXT.encode("utf-8-sig"), TEXT),
        ("a.csv.gz", gzip.compress(TEXT.encode()), TEXT),
        ("a.csv.gz", b"", ""),
    ):
        (tmp_path / name).write_bytes(content)
        assert read_text(tmp_path / name) == text
    with pytest.raises(GuardError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", gzip.compress(b"x"), r"a.csv: a gzip file, though its name does not end in .gz"),
        ("a.gz", b"text", r"a.gz: not a readable gzip file, though its name ends in .gz.*Rename"),
        ("a.gz", gzip.compress(gzip.compress(b"x")), "a.gz: a gzip file, not text in UTF-8"),
        (
            "a.csv",
            b"PK\x03\x04",
            r"a zip archive, as .xlsx is, not text in UTF-8\. Save it as text",
        ),
        ("a.csv", TEXT.encode("utf-16"), "UTF-16 or UTF-32 text, not text in UTF-8"),
        ("a.csv", TEXT.encode("utf-16-le"), "UTF-16 text or a binary file"),
        ("a.csv", TEXT.encode("cp1252"), r"a.csv:2: not UTF-8 text \(got byte 0xe9, .* 'é'\)"),
        ("a.csv", b"a\rb\r\xe9", "a.csv:3: not UTF-8 text"),
    ],
)
def test_what_is_no_text_says_what_it_is_and_where(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GuardError, match=message):
        read_text(tmp_path / name)
