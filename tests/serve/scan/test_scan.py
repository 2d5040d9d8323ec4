"""A scan that is cut off anywhere ends as one that was not; how its conversations are judged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import Call, OpenCheck
from serve.scan import judge as judging
from serve.scan.judge import judge, part_rows
from serve.scan.parts import PartFolder, ScanManifest
from serve.scan.run import summary
from serve.scan.scan import scan
from serve.scan.sources import StoredConversation, state_of
from tests.serve.client.censor import Censor
from tests.serve.toy_engine import ToyEngine

TEXTS = {3: "forbidden", 8: "cannot be judged", 11: "forbidden"}  # of these rows


def write_rows(path: Path, count: int) -> Path:
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = TEXTS.get(number, f"number {number}")
        rows.append({"id": f"c{number}", "messages": [{"role": "user", "content": text}]})
    rows[5] = {"id": "c5"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def manifest(*files: Path, rows_a_part: int = 4) -> ScanManifest:
    states = {str(file): state_of(str(file)) for file in files}
    rules = {"words": "abc", "fine": "def"}
    return ScanManifest("toy", states, rules, rows_a_part)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_every_row_has_a_verdict_of_every_rule_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, 10) for name in ("a.jsonl", "b.jsonl")]
    (tmp_path / "empty.jsonl").touch()
    folder = PartFolder(tmp_path / "scan", manifest(files[0], tmp_path / "empty.jsonl", files[1]))
    finished = scan(Censor(), folder)
    rows = [row for number in range(5) for row in folder.read(number)]
    places = [(row["source"], row["row"], row["rule"]) for row in rows]
    expected: list[tuple[str, int, str]] = []
    for file in files:
        for number in range(10):
            expected += [(str(file), number, "words"), (str(file), number, "fine")]
    assert places == expected
    flagged = {(row["source"], row["id"]) for row in rows if row["verdict"] == "violation"}
    assert flagged == {(str(file), "c3") for file in files}
    unjudged = {row["id"]: row for row in rows if row["verdict"] == "unjudged"}
    assert "no conversation" in unjudged["c5"]["reason"]
    assert (unjudged["c8"]["reason"], unjudged["c8"]["code"]) == ("it does not fit", "too_long")
    assert unjudged["c8"]["p_violation"] is None and unjudged["c8"]["threshold"] is None
    assert rows[0]["p_violation"] < rows[0]["threshold"] == 0.25 and rows[0]["confident"]
    assert [row["version"] for row in rows[:2]] == ["abc", "def"]
    assert finished.conversations == 20
    assert finished.verdicts == {
        "words": {"allow": 14, "violation": 2, "unjudged": 4},
        "fine": {"allow": 16, "unjudged": 4},
    }
    assert "words          2         14          4" in summary(finished, folder.folder)


def test_a_scan_that_breaks_at_every_step_loses_and_repeats_nothing(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", 18)
    whole = PartFolder(tmp_path / "whole", manifest(file))
    scan(Censor(), whole)
    broken = PartFolder(tmp_path / "broken", manifest(file))
    steps, breaks = 0, 0

    def break_later() -> None:
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            raise KeyboardInterrupt

    asked: list[tuple[Message, ...]] = []
    while not broken.finished:
        engine = Censor()
        engine.on_step = break_later
        try:
            scan(engine, broken)
        except KeyboardInterrupt:
            breaks += 1
        asked += engine.conversations
    assert breaks >= 2
    assert content(broken.folder) == content(whole.folder)
    assert len(asked) > 17  # what broke was asked again


def test_a_part_that_is_not_whole_is_named_and_judged_again_once_it_is_deleted(
    tmp_path: Path,
) -> None:
    folder = PartFolder(tmp_path / "scan", manifest(write_rows(tmp_path / "a.jsonl", 10)))
    scan(Censor(), folder)
    whole = content(folder.folder)
    part = folder.folder / "part-000001.jsonl"
    for rest in ("", whole[part.name].splitlines(keepends=True)[0]):
        part.write_text(rest)
        with pytest.raises(GuardError, match=r"part-000001\.jsonl: the part is broken.*Delete it"):
            scan(Censor(), folder)
        assert content(folder.folder) == whole | {part.name: rest}
    part.unlink()
    assert folder.finished is None
    scan(Censor(), folder)
    assert content(folder.folder) == whole
    again = PartFolder(folder.folder, folder.manifest).finished
    assert again is not None and again.conversations == 10


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: write_rows(file, 12), "it has changed since the scan.*FORCE=1"),
        (lambda file: os.utime(file, ns=(0, 0)), "it has changed since the scan.*FORCE=1"),
        (lambda file: file.unlink(missing_ok=True), "it cannot be read any more: No such file"),
    ],
)
def test_a_source_that_changes_while_it_is_scanned_is_no_finished_scan(
    tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    file = write_rows(tmp_path / "a.jsonl", 10)
    folder = PartFolder(tmp_path / "scan", manifest(file))
    engine = Censor()
    engine.on_step = lambda: change(file)
    with pytest.raises(GuardError, match=rf"a\.jsonl: {problem}"):
        scan(engine, folder)
    assert folder.finished is None


def conversation(*contents: str) -> tuple[Message, ...]:
    return tuple(Message("user", content) for content in contents)


def test_those_that_share_a_beginning_are_asked_one_after_the_other_and_few_at_once(
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "OPEN", 3)
    engine = ToyEngine({"fine": -2.0})
    open_at_once: list[int] = []
    engine.on_step = lambda: open_at_once.append(sum(not call.done for _, call in engine.open))
    asked = [conversation("b", "2"), conversation("a"), conversation("b"), conversation("b", "1")]
    judge(engine, asked, ["fine"])  # type: ignore[arg-type]
    assert engine.conversations == [asked[1], asked[2], asked[3], asked[0]]
    assert max(open_at_once) == 3


class Brittle(Censor):
    """A batch with "poison" in it fails."""

    def __init__(self) -> None:
        super().__init__()
        self._poisoned: list[Call] = []

    def open_check(self, *arguments: Any, **options: Any) -> OpenCheck:
        opened = super().open_check(*arguments, **options)
        if any("poison" in message.content for message in arguments[0]):
            self._poisoned.append(opened.call)
        return opened

    def step(self) -> None:
        for _, call in self.open:
            if any(poisoned is call for poisoned in self._poisoned):
                raise RuntimeError("out of\nmemory")
        super().step()


@pytest.mark.parametrize("broken", ["poison", "breaks"])  # at a step; when it is opened
def test_a_failing_check_is_refused_and_the_others_are_judged(broken: str) -> None:
    texts = [f"number {number}" for number in range(50)]
    texts[7], texts[8], texts[31] = broken, "forbidden", "forbidden"
    engine = Brittle()
    checks = judge(engine, [conversation(text) for text in texts], ["words", "fine"])
    violated = [number for number, check in enumerate(checks) if check.outcome == "violation"]
    assert violated == [8, 31]
    for number, check in enumerate(checks):
        assert bool(check.refused) == (number == 7) != bool(check.verdicts)
    reasons = {refusal.why for refusal in checks[7].refused.values()}
    errors = {"poison": "RuntimeError: out of memory", "breaks": "GuardError: the check broke"}
    assert reasons == {f"the engine failed: {errors[broken]}"}
    assert engine.open == [] or all(call.done for _, call in engine.open)


def test_an_engine_that_answers_nothing_any_longer_is_an_error_that_names_the_rows() -> None:
    engine = ToyEngine()
    part = [StoredConversation("a.jsonl", number, "", conversation("zebra")) for number in (4, 5)]
    crashing = replace(manifest(), rules={"crash": "abc"})
    problem = r"a\.jsonl, row 4, to a\.jsonl, row 5: .*RuntimeError: the batch broke.*again"
    with pytest.raises(GuardError, match=problem):
        part_rows(engine, part, crashing)  # type: ignore[arg-type]
    assert engine.open == []
