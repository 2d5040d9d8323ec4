"""The end of the conversations that are shown, and of no other."""

from __future__ import annotations

import json
from pathlib import Path

from guard.conversation.example import Message
from serve.replay.excerpts import ELLIPSIS, MAX_CHARACTERS, excerpts, shortened


def test_the_rows_that_are_named_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"number {number}"}) + "\n" for number in range(10)]
    file.write_text("".join(lines))
    texts = excerpts([(str(file), 7), (str(file), 2)])
    assert texts == {
        (str(file), 2): (Message("user", "number 2"),),
        (str(file), 7): (Message("user", "number 7"),),
    }
    assert excerpts([]) == {}


def test_a_long_conversation_keeps_its_end() -> None:
    start = Message("system", "x" * 50)
    long = Message("user", "y" * 2 * MAX_CHARACTERS + "its end")
    last = Message("assistant", "the last turn")
    turns = shortened([start, long, last])
    assert turns[-1] == last and turns[0] == Message("system", ELLIPSIS)
    assert turns[1].content.endswith("its end")
    assert sum(len(turn.content) for turn in turns) <= MAX_CHARACTERS + 2
    assert shortened([start, last]) == (start, last)
