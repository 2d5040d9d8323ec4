"""Every conversation and rule has a row, judged or with the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.scan.judge import part_rows
from serve.scan.sources import StoredConversation
from tests.serve.client.censor import Censor
from tests.serve.scan.test_scan import manifest


def stored(number: int, content: str, problem: str = "") -> StoredConversation:
    messages = () if problem else (Message("user", content),)
    return StoredConversation("a.jsonl", number, f"c{number}", messages, problem)


def test_rows_stand_in_the_order_of_conversations_and_rules() -> None:
    part = [
        stored(0, "zebra"),
        stored(1, "", "not valid JSON"),
        stored(2, "cannot be judged"),
        stored(3, "forbidden"),
    ]
    rows = part_rows(Censor(), part, manifest())
    assert [(row.row, row.rule) for row in rows] == [
        (number, rule) for number in range(4) for rule in ("words", "fine")
    ]
    verdicts = [row.verdict for row in rows if row.rule == "words"]
    assert verdicts == ["allow", "unjudged", "unjudged", "violation"]
    assert [row.reason for row in rows if row.rule == "fine"] == [
        "",
        "not valid JSON",
        "it does not fit",
        "",
    ]
    judged = rows[0]
    assert judged.p_violation is not None and judged.threshold == 0.25 and judged.confident
    assert {row.version for row in rows} == {"abc", "def"}
    assert rows[2].p_violation is None and rows[2].threshold is None


def test_nothing_readable_asks_nothing(tmp_path: Path) -> None:
    engine = Censor()
    rows = part_rows(engine, [stored(0, "", "not valid JSON")], manifest())
    assert [row.verdict for row in rows] == ["unjudged"] * 2 and engine.conversations == []


def test_an_engine_that_fails_is_an_error_that_names_the_rows() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    engine = Censor()
    engine.on_step = fail
    part = [stored(4, "zebra"), stored(5, "forbidden")]
    with pytest.raises(GuardError, match=r"a\.jsonl, row 4, to a\.jsonl, row 5: .*device is gone"):
        part_rows(engine, part, manifest())
