"""What is stored is what a scan reads: mixed lengths, all kinds of files, a few broken rows."""

from __future__ import annotations

from pathlib import Path

from serve.bench.scan.stored import LONGEST, SHORTEST, UNREADABLE_EVERY, save_rows, stored_rows
from serve.scan.sources import read_source


def test_rows_have_mixed_lengths_and_some_share_their_beginning() -> None:
    rows = [row for row in stored_rows(2 * UNREADABLE_EVERY) if "messages" in row]
    assert len(rows) == 2 * UNREADABLE_EVERY - 2
    systems = [row["messages"][0]["content"] for row in rows if _is_system(row)]
    assert 0.25 < len(systems) / len(rows) < 0.42 and len(set(systems)) == 8
    lengths = [_words(row) for row in rows if not _is_system(row)]
    assert SHORTEST <= min(lengths) < 50 and 600 < max(lengths) <= LONGEST
    assert stored_rows(20) == stored_rows(20) != stored_rows(20, seed=1)


def test_every_kind_of_file_gives_the_rows_back(tmp_path: Path) -> None:
    rows = stored_rows(2 * UNREADABLE_EVERY)
    files = save_rows(tmp_path, rows)
    assert [file.name for file in files] == ["1.jsonl", "2.jsonl.gz", "3.parquet", "4.jsonl"]
    stored = [row for file in files for row in read_source(str(file))]
    assert [row.id for row in stored] == [row["id"] for row in rows]
    assert [row.number for row in stored if row.problem] == [249, 249]
    for conversation, row in zip(stored, rows, strict=True):
        contents = [message["content"] for message in row.get("messages", [])]
        assert [message.content for message in conversation.messages] == contents


def _is_system(row: dict[str, list[dict[str, str]]]) -> bool:
    return row["messages"][0]["role"] == "system"


def _words(row: dict[str, list[dict[str, str]]]) -> int:
    return sum(len(message["content"].split()) for message in row["messages"])
