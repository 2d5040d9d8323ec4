"""Corpora for the base: local files, windows, clear errors."""

import gzip
import hashlib
import json
import random
import re
from pathlib import Path

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from train.tiny.lessons.corpus import read_corpus, window

ROW = {
    "messages": [
        {"role": "user", "content": "one two three"},
        {"role": "assistant", "content": "four five"},
    ],
    "license": "MIT",
}
ROW["source"] = "somebody/talk:data/one.json"


def test_plain_and_gzipped_files_are_read_with_their_licences(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((json.dumps(ROW) + "\n").encode()))
    sources = read_corpus(f"{tmp_path}/*.jsonl,{tmp_path}/*.gz")
    assert [source.name for source in sources] == ["a.jsonl", "b.jsonl.gz"]
    assert sources[0].conversations == [
        (Message("user", "one two three"), Message("assistant", "four five"))
    ]
    assert sources[0].licences == ("MIT",)
    assert sources[0].origins == ("somebody/talk",)
    assert (
        sources[0].digest
        == f"sha256:{hashlib.sha256((tmp_path / 'a.jsonl').read_bytes()).hexdigest()}"
    )


def test_a_corpus_that_matches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"nothing\*\.jsonl: no such corpus file"):
        read_corpus(f"{tmp_path}/nothing*.jsonl")


def test_a_data_set_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(GuardError, match=r"hub:.*cannot load the data set"):
        read_corpus(f"hub:{tmp_path}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (json.dumps({"messages": [{"role": "king", "content": "x"}]}), "turn 0: unknown role"),
        ('{"messages": [', "not valid JSON"),
        ("[1]", "must be an object, got list"),
        ('{"text": "x"}', "messages must be a non-empty list"),
    ],
)
def test_a_bad_row_is_named_by_line(tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(ROW)}\n\n{row}\n")
    with pytest.raises(GuardError, match=rf"a\.jsonl:3: {message}"):
        read_corpus(f"{tmp_path}/a.jsonl")


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three"
    row = {"messages": [{"role": "user", "content": text}]}
    (tmp_path / "a.jsonl").write_text(
        json.dumps(row, ensure_ascii=False) + "\n \n", encoding="utf-8"
    )
    assert read_corpus(f" {tmp_path}/a.jsonl, ")[0].conversations == [(Message("user", text),)]


def test_a_corpus_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(GuardError, match=r"a\.jsonl: no conversations"):
        read_corpus(f"{tmp_path}/a.jsonl")


def test_a_hub_data_set_has_the_librarys_fingerprint_as_its_digest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    (source,) = read_corpus(f"hub:{tmp_path}")
    assert re.fullmatch(r"datasets:[0-9a-f]{16}", source.digest)
    assert source.conversations[0][1] == Message("assistant", "four five")


def test_a_window_keeps_order_and_about_the_asked_number_of_words() -> None:
    conversation = tuple(Message("user", f"turn {number} " + "word " * 8) for number in range(30))
    taken = window(conversation, 40, random.Random(0))
    numbers = [int(message.content.split()[1]) for message in taken]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert 1 <= sum(len(message.content.split()) for message in taken) <= 50
