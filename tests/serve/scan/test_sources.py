"""Stored conversations from files, folders, patterns and data sets, good rows and bad ones."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.scan import sources
from serve.scan.sources import find_sources, names_of, read_source

HI = [{"role": "user", "content": "Hi"}]


def write_lines(path: Path, *rows: Any) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def write_parquet(path: Path, *rows: Any) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=1)
    return str(path)


def test_patterns_folders_and_names_are_files_in_order_each_once(tmp_path: Path) -> None:
    names = ["b/2.jsonl", "b/1.jsonl.gz", "b/.hidden/3.jsonl", "b/notes.txt"]
    paths = {name: write_lines(tmp_path / name, {}) for name in names}
    parquet = write_parquet(tmp_path / "a.parquet", {"text": "Hi"})
    found = find_sources([str(tmp_path / "b"), str(tmp_path / "*.parquet"), paths["b/2.jsonl"]])
    assert found == [paths["b/1.jsonl.gz"], paths["b/2.jsonl"], parquet]
    assert find_sources([str(tmp_path / "**/2.jsonl")]) == [paths["b/2.jsonl"]]
    spelt_twice = [paths["b/2.jsonl"], f"{tmp_path}/b/../b/*.jsonl"]
    assert find_sources(spelt_twice) == [paths["b/2.jsonl"]]


def test_what_names_no_readable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    for name in ("nowhere.jsonl", "*.jsonl", "notes.txt", "empty"):
        with pytest.raises(GuardError, match=r"no file of stored conversations.*\.parquet"):
            find_sources([str(tmp_path / name)])
    with pytest.raises(GuardError, match="FILES="):
        find_sources([])
    with pytest.raises(GuardError, match=r"files must be a list of names .*Write \['logs/"):
        find_sources("logs/*.jsonl")
    write_lines(Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.jsonl")), {"text": "Hi"})
    with pytest.raises(GuardError, match=r"not UTF-8.*caf.udce9.*Rename it"):
        find_sources([str(tmp_path)])
    assert names_of("a.jsonl 'b c.jsonl'") == ["a.jsonl", "b c.jsonl"]
    with pytest.raises(GuardError, match=r"FILES: No closing quotation.*bob's logs"):
        names_of("bob's logs/*.jsonl")


LINES = {
    json.dumps({"id": 0, "messages": HI}).encode(): "",
    json.dumps({"id": "\ud800", "text": "Hi"}).encode(): "",
    json.dumps({"id": None, "text": "Hi"}).encode(): "",
    json.dumps({"\ud800": 1}).encode(): r"\ud800",
    json.dumps({"messages": "\ud800"}).encode(): r"\ud800",
    b"{broken": "not valid JSON",
    b"[1]": "must be an object",
    b"{}": "no conversation",
    '{"text": "caf\u00e9"}'.encode("cp1252"): "not UTF-8 text, byte 0xe9, in Windows-1252 '\u00e9'",
    # Readers differ in which one counts.
    b'{"messages": [{"role": "user", "content": "bad", "content": "Hi"}]}': (
        "not valid JSON: the key 'content' stands twice at column 50"
    ),
}


@pytest.mark.parametrize(
    ("name", "end"),
    [("rows.jsonl", b"\n"), ("rows.jsonl.gz", b"\n\n"), ("rows.ndjson", b"\r")],  # of an old Mac
)
def test_lines_are_conversations_and_bad_ones_say_why(
    tmp_path: Path, name: str, end: bytes
) -> None:
    path = tmp_path / name
    data = end.join(LINES) + end
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    rows = list(read_source(str(path)))
    assert [row.number for row in rows] == [*range(len(LINES))]
    assert [row.id for row in rows[:3]] == ["0", r"\ud800", ""]
    for row, problem in zip(rows, LINES.values(), strict=True):
        assert problem in row.problem and bool(problem) == bool(row.problem.encode())
        assert row.messages == (() if problem else (Message("user", "Hi"),))
    assert rows[-1].read_bytes == path.stat().st_size


def test_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = [pyarrow.array(["bad"]), pyarrow.array(["Hi"])]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["text", "text"]), path)
    with pytest.raises(GuardError, match=r"columns of one name \(got text\)"):
        list(read_source(str(path)))


def test_an_endless_line_is_bounded(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 64)
    path = write_lines(tmp_path / "rows.jsonl", {"text": "x" * 300}, {"text": "Hi"})
    too_long, short = read_source(path)
    assert "more than 64 bytes" in too_long.problem
    assert short.messages == (Message("user", "Hi"),)


def test_parquet_rows_have_lists_or_json(tmp_path: Path) -> None:
    rows = [{"id": "a", "messages": HI, "asked": None}, {"id": "b", "messages": None, "asked": "x"}]
    path = write_parquet(tmp_path / "rows.parquet", *rows)
    first, second = read_source(path)
    assert (first.id, first.messages) == ("a", (Message("user", "Hi"),))
    assert "no conversation" in second.problem
    text = write_parquet(tmp_path / "text.parquet", {"messages": json.dumps(HI)})
    assert next(iter(read_source(text))).messages == (Message("user", "Hi"),)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz", "rows.jsonl"])
def test_a_file_that_is_not_there_of_another_kind_or_unreadable_is_named(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    with pytest.raises(GuardError, match=f"{name}: not readable"):
        list(read_source(str(file)))
    if name != "rows.jsonl":
        file.write_bytes(b"{}\n")
        with pytest.raises(GuardError, match=f"{name}: not readable.*FILES="):
            find_sources([str(tmp_path)])
        file.unlink()
    file.symlink_to("/proc/self/mem")  # whose beginning is no memory
    with pytest.raises(GuardError, match=f"{name}: not readable"):
        find_sources([str(file)])


def test_a_file_that_is_cut_off_or_damaged_is_named(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PARQUET_ROWS", 1)
    texts = [{"text": "first"}, {"text": "second"}]
    parquet = Path(write_parquet(tmp_path / "rows.parquet", *texts))
    page = pyarrow.parquet.read_metadata(parquet).row_group(1).column(0).dictionary_page_offset
    content = parquet.read_bytes()
    parquet.write_bytes(content[:page] + bytes(20) + content[page + 20 :])
    rows = read_source(str(parquet))
    assert next(rows).messages == (Message("user", "first"),)
    with pytest.raises(GuardError, match=f"{parquet}: not readable"):
        next(rows)
    damaged = bytearray(gzip.compress(b'{"text": "Hi"}\n' * 5000))
    damaged[12:30] = bytes(18)
    (tmp_path / "rows.jsonl.gz").write_bytes(damaged)
    with pytest.raises(GuardError, match="not readable"):
        list(read_source(str(tmp_path / "rows.jsonl.gz")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", gzip.compress(b"{}"), "a gzip file, though its name does not end in .gz"),
        ("rows.jsonl.gz", b"{}", "not a readable gzip file, though its name ends in .gz"),
        ("rows.jsonl", b"PK\x03\x04", "a zip archive"),
        ("rows.jsonl", '{"text": "Hi"}'.encode("utf-16"), "UTF-16 or UTF-32 text, not text"),
        ("rows.jsonl.gz", gzip.compress("{}".encode("utf-16")), "UTF-16 or UTF-32 text, not text"),
    ],
)
def test_a_file_unlike_its_name_is_named_before_it_is_judged(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GuardError, match=f"{name}: not readable: {message}"):
        find_sources([str(tmp_path)])
