import gzip
from pathlib import Path

import pytest

from data.rows import SourceRow, read_rows
from guard.errors import GuardError


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _read(path: Path, content: str | bytes) -> list[SourceRow]:
    _write(path, content)
    return list(read_rows(str(path)))


def test_every_row_says_where_it_stands_and_has_no_empty_fields(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    assert _read(path, '{"text": "a", "note": null}\n\n{"text": "b"}\n') == [
        SourceRow(f"{path}:1", {"text": "a"}),
        SourceRow(f"{path}:3", {"text": "b"}),
    ]
    path = tmp_path / "own.csv.gz"
    assert _read(path, gzip.compress(b'text,note\n"a\nb",\nc,d\n')) == [
        SourceRow(f"{path}:2", {"text": "a\nb"}),
        SourceRow(f"{path}:4", {"text": "c", "note": "d"}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.jsonl", '[\n {"text": "a"}\n]', "one JSON list, not an object a line.*jq -c"),
        ("own.csv", '{"text": "a", "label": 1}\n', "objects of JSON, not the columns.*jsonl"),
        ("own.csv", "text,label, label\na,1,0\n", "columns of one name.*label"),
        ("own.csv.gz", b"not gzip", "not a readable gzip file.*Rename it"),
        ("own.parquet", None, r"cannot read this kind of file.*Known: \.jsonl, \.jsonl\.gz, \.csv"),
        ("own.jsonl", None, "no such file"),
        ("set.csv", None, r"set\.csv: a folder, not a file.*Name a file in it"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named_once_with_what_to_do(
    tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    (tmp_path / "set.csv").mkdir()
    if content is not None:
        _write(tmp_path / name, content)
    with pytest.raises(GuardError, match=message):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_the_header_says_what_separates(tmp_path: Path, delimiter: str, line_end: str) -> None:
    lines = [("id", "text", "label"), ("1", '"a, b; c | d"', "0"), ("2", "plain", "1"), ()]
    path = tmp_path / "own.csv"
    assert _read(path, line_end.join(delimiter.join(line) for line in lines)) == [
        SourceRow(f"{path}:2", {"id": "1", "text": "a, b; c | d", "label": "0"}),
        SourceRow(f"{path}:3", {"id": "2", "text": "plain", "label": "1"}),
    ]


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("text,a;b;c;d,label\nHi,x,1\n", {"text": "Hi", "a;b;c;d": "x", "label": "1"}),
        ('"text","a\n;;;;b"\nHi;,1\n', {"text": "Hi;", "a\n;;;;b": "1"}),
        ("text\na;b\n", {"text": "a;b"}),
        ("Frage;Antwort\nHi, you;Yes, I\n", {"Frage": "Hi, you", "Antwort": "Yes, I"}),
    ],
)
def test_commas_separate_where_they_give_a_column(
    tmp_path: Path, content: str, fields: dict[str, str]
) -> None:
    (row,) = _read(tmp_path / "own.csv", content)
    assert row.fields == fields


def test_cells_that_are_too_many_or_open_are_told_and_long_ones_read(tmp_path: Path) -> None:
    (row,) = _read(tmp_path / "own.csv", "text;label\na;b;1\n")
    assert row.problem == (
        "more cells than columns: put text with semicolons in quotes "
        "(columns, by semicolons: text, label)"
    )
    _, row = _read(tmp_path / "own.csv", 'text,label\nfine,1\n"open,1\nmore,0\n')
    assert row.where.endswith(":3") and "check the quotes from here on" in row.problem
    (long,) = _read(tmp_path / "own.csv", f"text,label\n{'long ' * 40_000},1\n")
    assert len(long.fields["text"]) == 200_000
