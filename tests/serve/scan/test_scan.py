"""A scan that is cut off anywhere ends as one that was not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.scan.parts import PartFolder, ScanManifest
from serve.scan.run import summary
from serve.scan.scan import read_parts, scan
from serve.scan.sources import size_of, state_of
from tests.serve.client.censor import Censor

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
    return ScanManifest("toy", states, rules, rows_a_part, "jsonl")


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_every_row_has_a_verdict_of_every_rule_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, 10) for name in ("a.jsonl", "b.jsonl")]
    folder = PartFolder(tmp_path / "scan", manifest(*files))
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
    assert content(folder.folder) == whole and folder.finished is not None


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


def test_a_part_goes_on_in_the_next_source_and_bytes_add_up(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, 7) for name in ("a.jsonl", "b.jsonl")]
    parts = list(read_parts(manifest(*files, rows_a_part=4)))
    assert [len(part.conversations) for part in parts] == [4, 4, 4, 2]
    assert sum(part.read_bytes for part in parts) == sum(size_of(str(file)) for file in files)
    assert all(part.read_bytes > 0 for part in parts)
    (tmp_path / "empty.jsonl").touch()
    assert list(read_parts(manifest(tmp_path / "empty.jsonl"))) == []
