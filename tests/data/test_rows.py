import gzip
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from data.rows import SourceRow, is_hub_id, is_readable, local_files, read_rows
from guard.errors import GuardError


def test_every_row_says_where_it_stands_and_has_no_empty_fields(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"text": "a", "note": null}\n\n{"text": "b"}\n')
    (tmp_path / "own.csv.gz").write_bytes(gzip.compress(b'text,note\n"a\nb",\nc,d\n'))
    json_path, csv_path = str(tmp_path / "own.jsonl"), str(tmp_path / "own.csv.gz")
    assert list(read_rows(json_path)) == [
        SourceRow(f"{json_path}:1", {"text": "a"}),
        SourceRow(f"{json_path}:3", {"text": "b"}),
    ]
    assert list(read_rows(csv_path)) == [
        SourceRow(f"{csv_path}:2", {"text": "a\nb"}),
        SourceRow(f"{csv_path}:4", {"text": "c", "note": "d"}),
    ]


def test_a_row_that_cannot_be_read_says_why_and_the_next_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": \n[1]\n{"text": "b"}\n')
    broken, listed, fine = read_rows(str(path))
    assert broken.problem.startswith("not valid JSON (")
    assert listed.problem == "must be an object, got list"
    assert (fine.problem, fine.fields) == ("", {"text": "b"})


def test_a_key_twice_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "b", "label": 1, "label": 0}\n')
    (row,) = read_rows(str(path))
    assert row.fields == {} and row.where == f"{path}:1"
    assert "the key 'label' stands twice at column 27" in row.problem


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path) -> None:
    assert is_readable("rows.csv.gz") and not is_readable("rows.parquet")
    with pytest.raises(GuardError, match=r"cannot read this kind of file.*\.jsonl"):
        list(read_rows(str(tmp_path / "rows.parquet")))
    with pytest.raises(GuardError, match="no such file"):
        list(read_rows(str(tmp_path / "rows.jsonl")))


def test_the_files_of_a_source_are_those_it_is_read_from(tmp_path: Path) -> None:
    for name in ("set/train.jsonl", "set/deep/test.jsonl", "set/.cache/x", "set/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folder = tmp_path / "set"
    assert local_files(f"hub:{folder}") == [folder / "deep" / "test.jsonl", folder / "train.jsonl"]
    assert local_files(f"hub:{folder}:english") == local_files(f"hub:{folder}")
    assert local_files(str(folder / "train.jsonl")) == [folder / "train.jsonl"]
    assert local_files("hub:some/set") == local_files(str(folder)) == local_files("generator") == []
    assert is_hub_id("hub:some/set:english")
    assert not is_hub_id(f"hub:{folder}:english") and not is_hub_id(str(folder / "train.jsonl"))


@pytest.mark.parametrize("broken", ["cut", "flipped"])
def test_a_broken_gzip_file_is_named_with_what_to_do(tmp_path: Path, broken: str) -> None:
    content = bytearray(gzip.compress(b"text,note\n" + bytes(range(97, 123)) * 50))
    if broken == "cut":
        content = content[:-20]
    else:
        for position in range(12, 30):
            content[position] ^= 0xFF
    path = tmp_path / "own.csv.gz"
    path.write_bytes(content)
    with pytest.raises(GuardError, match=r"not a readable gzip file.*Compress it again"):
        list(read_rows(str(path)))


def test_a_broken_file_of_a_data_set_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(GuardError, match=r"hub:.*set: cannot load the data set: \w+"):
        list(read_rows(f"hub:{tmp_path / 'set'}"))


def test_rows_that_break_off_while_they_are_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        features = None

        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": "a"}
            raise RuntimeError("block of 5 bytes")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": Broken()})
    rows = read_rows(f"hub:{tmp_path}")
    assert next(rows).fields == {"text": "a"}
    with pytest.raises(GuardError, match="RuntimeError block of 5 bytes"):
        next(rows)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_columns_are_separated_as_the_header_says(
    tmp_path: Path, delimiter: str, line_end: str
) -> None:
    lines = [("id", "text", "label"), ("1", '"a, b; c | d"', "0"), ("2", "plain", "1"), ()]
    path = tmp_path / "own.csv"
    path.write_bytes(line_end.join(delimiter.join(line) for line in lines).encode())
    assert list(read_rows(str(path))) == [
        SourceRow(f"{path}:2", {"id": "1", "text": "a, b; c | d", "label": "0"}),
        SourceRow(f"{path}:3", {"id": "2", "text": "plain", "label": "1"}),
    ]


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("text,a;b;c;d,label\nHi,x,1\n", {"text": "Hi", "a;b;c;d": "x", "label": "1"}),
        ('"text","a\n;;;;b"\nHi;,1\n', {"text": "Hi;", "a\n;;;;b": "1"}),
        ("text\na;b\n", {"text": "a;b"}),
        ("text;label (0, 1)\nHi, you;1\n", {"text": "Hi, you", "label (0, 1)": "1"}),
        ("Frage;Antwort\nHi, you;Yes, I\n", {"Frage": "Hi, you", "Antwort": "Yes, I"}),
    ],
)
def test_commas_separate_where_they_give_a_column_of_the_conversation(
    tmp_path: Path, content: str, fields: dict[str, str]
) -> None:
    (tmp_path / "own.csv").write_text(content)
    (row,) = read_rows(str(tmp_path / "own.csv"))
    assert row.fields == fields


def test_too_many_cells_are_said_with_the_sign_and_the_columns(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("text;label\na;b;1\n")
    (row,) = read_rows(str(tmp_path / "own.csv"))
    assert row.problem == (
        "more cells than columns: put text with semicolons in quotes "
        "(columns, by semicolons: text, label)"
    )


def test_a_line_end_of_another_kind_is_said(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes(b"text,label\na,1\rb,0\n")
    (row,) = read_rows(str(tmp_path / "own.csv"))
    assert row.problem.startswith("a line ends in \\r alone, others in \\n")


def test_lines_that_end_as_on_an_old_mac_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"text": "a"}\r{"text": "b"}\r')
    assert [row.where for row in read_rows(str(path))] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.jsonl", '[\n {"text": "a"}\n]', "one JSON list, not an object a line.*jq -c"),
        ("own.csv", '{"text": "a", "label": 1}\n', "objects of JSON, not the columns.*jsonl"),
    ],
)
def test_rows_of_another_format_are_named_once(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(GuardError, match=message):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["set", "set.csv"])
def test_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(GuardError, match=rf"a folder, not a file.*hub:.*{name}"):
        list(read_rows(str(tmp_path / name)))
