"""Examples as JSON lines: what is written is what is read, and a bad row is named by its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guard.conversation.example import REAL, Example, Message, read_examples, write_examples
from guard.errors import GuardError

HI = {"role": "user", "content": "hi"}
ROW: dict[str, Any] = {
    "id": "1", "rule": "pii_leak", "messages": [HI], "label": 1,
    "split": "test", "source": "generator", "group": "g", "meta": {"stratum": "unseen"},
}  # fmt: skip


def example(text: str = "hi", **changes: Any) -> Example:
    return Example(**(ROW | {"messages": (Message("user", text),)} | changes))


@given(st.text())
@hypothesis.example("a\u2028b\u2029c\x85d\x0ce\rf\ng")  # lines to Python
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back_as_it_was_written(tmp_path: Path, text: str) -> None:
    written = [example(text), example("second", label=0)]
    digest = write_examples(tmp_path / "deep" / "test.jsonl", written)
    assert read_examples(tmp_path / "deep" / "test.jsonl") == written
    assert digest == hashlib.sha256((tmp_path / "deep" / "test.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not an example"),
        ("", "not an example"),
        ("[]", "not an example"),
        (b"\xff", "not an example"),
        ({"label": 2}, r"label must be 0 or 1 \(got 2\)"),
        ({"label": True}, "label must be 0 or 1"),
        ({"split": "dev"}, r"unknown split \(got 'dev'\). Known: train, validation, test"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [HI, HI | {"role": "bot"}]}, r"turn 1: unknown role \(got bot\). Known: sys"),
        ({"messages": [HI | {"content": None}]}, "turn 0 must be"),
        ({"messages": [HI | {"content": "\ud83d"}]}, "turn 0: the content is not Unicode text"),
        ({"label": 0, "twin": 1}, r"twin must be true or false \(got 1\)"),
        ({"twin": True}, "a twin is harmless, but the row violates.*label 0, or leave twin out"),
        ({"unknown": 1}, "unexpected keyword argument 'unknown'"),
        ({"rule": ...}, "missing 1 required positional argument: 'rule'"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / "test.jsonl"
    if isinstance(line, dict):
        line = json.dumps({key: value for key, value in (ROW | line).items() if value is not ...})
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join([json.dumps(ROW).encode(), bad, json.dumps(ROW).encode()]))
    with pytest.raises(GuardError, match=message) as caught:
        read_examples(path)
    assert f"{path}:2" in str(caught.value)


def test_an_example_that_cannot_be_written_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    write_examples(path, [example()])
    for change in ({"id": "\ud83d"}, {"meta": {"note": "\ud83d"}}, {"meta": {"at": object()}}):
        with pytest.raises((ValueError, TypeError)):
            write_examples(path, [example("new"), example(**change)])
    assert read_examples(path) == [example()]
    assert [path.name for path in tmp_path.iterdir()] == ["test.jsonl"]
    with pytest.raises(GuardError, match=r"no such file. Run `make data` first"):
        read_examples(tmp_path / "train.jsonl")


def test_a_twin_is_an_own_row_that_says_so_or_a_generated_one_that_looks_like_a_violation() -> None:
    near, own = {"stratum": "unseen", "stance": "quotes"}, {"stratum": REAL, "stance": "quotes"}
    assert example(label=0, twin=True, meta={}).is_twin and example(label=0, meta=near).is_twin
    assert not example(label=1, meta=near).is_twin and not example(label=0, meta=own).is_twin
    for harmless in ("unrelated", "declines", "informs"):
        assert not example(label=0, meta=near | {"stance": harmless}).is_twin


def test_rows_that_say_nothing_of_twins_are_written_as_before(tmp_path: Path) -> None:
    """So their digests hold, and the weights that were trained on them are not trained again."""
    rows = [example(label=0, meta={"stance": "quotes"}), example(label=0, twin=True, id="2")]
    write_examples(tmp_path / "test.jsonl", rows)
    before, marked = map(json.loads, (tmp_path / "test.jsonl").read_text().splitlines())
    assert before == ROW | {"label": 0, "meta": {"stance": "quotes"}}
    assert marked == ROW | {"label": 0, "id": "2", "twin": True}
    assert read_examples(tmp_path / "test.jsonl") == rows
