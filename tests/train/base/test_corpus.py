"""Corpora for the base: local files, windows, clear errors."""

import gzip
import json
import random
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.example import Message
from train.base.corpus import read_corpus, window

ROW = {"messages": [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five"}], "license": "MIT"}


def test_plain_and_gzipped_files_are_read_with_their_licences(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((json.dumps(ROW) + "\n").encode()))
    sources = read_corpus(f"{tmp_path}/*.jsonl,{tmp_path}/*.gz")
    assert [source.name for source in sources] == ["a.jsonl", "b.jsonl.gz"]
    assert sources[0].conversations == [(Message("user", "one two three"), Message("assistant", "four five"))]
    assert sources[0].licences == ("MIT",)


def test_a_corpus_that_matches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"nothing\*\.jsonl: no such corpus file"):
        read_corpus(f"{tmp_path}/nothing*.jsonl")


def test_a_bad_row_is_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({"messages": [{"role": "king", "content": "x"}]}) + "\n")
    with pytest.raises(GuardError, match=r"a\.jsonl:2: turn 0: unknown role"):
        read_corpus(f"{tmp_path}/a.jsonl")


def test_a_window_keeps_order_and_about_the_asked_number_of_words() -> None:
    conversation = tuple(Message("user", f"turn {number} " + "word " * 8) for number in range(30))
    taken = window(conversation, 40, random.Random(0))
    numbers = [int(message.content.split()[1]) for message in taken]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert 1 <= sum(len(message.content.split()) for message in taken) <= 50
