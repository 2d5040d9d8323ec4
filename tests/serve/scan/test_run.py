"""A scan that is cut off anywhere ends as one that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from guard.example import Message
from serve.scan.parts import PartFolder, ScanManifest
from serve.scan.run import main, scan, summary
from serve.scan.sources import size_of
from tests.serve.client.censor import Censor
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter, text_of

FORBIDDEN = (3, 11)


def write_rows(path: Path, count: int) -> Path:
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = "forbidden" if number in FORBIDDEN else f"number {number}"
        rows.append({"id": f"c{number}", "messages": [{"role": "user", "content": text}]})
    rows[5] = {"id": "c5"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def manifest(*files: Path, rows_a_part: int = 4) -> ScanManifest:
    states = {str(file): (size_of(str(file)), 0) for file in files}
    rules = {"words": ("abc", 0.25), "fine": ("def", 0.25)}
    return ScanManifest("toy", states, rules, rows_a_part, "jsonl")


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_every_row_has_a_verdict_of_every_rule_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, 10) for name in ("a.jsonl", "b.jsonl")]
    folder = PartFolder(tmp_path / "scan", manifest(*files))
    finished = scan(Censor(), folder)
    rows = [row for number in range(5) for row in folder.read(number)]
    places = [(row["source"], row["row"], row["rule"]) for row in rows]
    expected = [
        (str(file), row, rule) for file in files for row in range(10) for rule in ("words", "fine")
    ]
    assert places == expected
    flagged = {(row["source"], row["id"]) for row in rows if row["verdict"] == "violation"}
    assert flagged == {(str(file), "c3") for file in files}
    unjudged = [row for row in rows if row["verdict"] == "unjudged"]
    assert {row["id"] for row in unjudged} == {"c5"} and len(unjudged) == 4
    assert all("no conversation" in row["reason"] for row in unjudged)
    assert finished.conversations == 20
    assert finished.verdicts == {
        "words": {"allow": 16, "violation": 2, "unjudged": 2},
        "fine": {"allow": 18, "unjudged": 2},
    }
    assert "words          2         16          2" in summary(finished, folder.folder)


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
            raise RuntimeError("the machine stops")

    asked: list[tuple[Message, ...]] = []
    while not broken.finished:
        engine = Censor()
        engine.on_step = break_later
        try:
            scan(engine, broken)
        except RuntimeError:
            breaks += 1
        asked += engine.conversations
    assert breaks >= 2
    assert content(broken.folder) == content(whole.folder)
    assert len(asked) > 17  # what broke was asked again


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "runs" / "tiny" / "mild" / "alora", "mild", seed=1)
    return tmp_path / "runs"


def command(runs: Path, *more: str) -> list[str]:
    settings = ["--runs", str(runs), "--rows-a-part", "8"]
    return [sys.executable, "-m", "serve.scan.run", *settings, *more]


@pytest.mark.slow
def test_a_killed_process_goes_on_and_says_what_peft_says(runs: Path, tmp_path: Path) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    file = tmp_path / "a.jsonl"
    rows = [{"id": str(number), "messages": messages} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = command(runs, "--files", str(file))
    first = subprocess.Popen(arguments)
    out = runs / "scan"
    while not (out / "part-000000.jsonl").exists():
        assert first.poll() is None, "it ended before it was killed"
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    first.wait()
    parts = len(list(out.glob("part-*.jsonl")))
    done = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    assert parts <= 5 and "40 conversations, 1 rules" in done
    lines = [line for path in sorted(out.glob("part-*")) for line in path.read_text().splitlines()]
    verdicts = [json.loads(line) for line in lines]
    assert [verdict["row"] for verdict in verdicts] == list(range(40))
    logit = peft_logit(CONVERSATION, text_of("mild"), runs / "tiny" / "mild" / "alora")
    p_violation = 1 / (1 + 2.718281828 ** -(logit / 2))
    for verdict in verdicts:  # in the dtype of this machine
        assert verdict["p_violation"] == pytest.approx(p_violation, abs=0.02)
    again = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    assert again.startswith("nothing changed")


def test_bad_input_is_found_before_an_engine_starts(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve.scan.run.start_engine", lambda _: pytest.fail("it starts"))
    file = write_rows(tmp_path / "a.jsonl", 18)
    wrong = {
        "no file of stored conversations": ("--files", "nowhere.jsonl"),
        "not trained by method": ("--files", str(file), "--rules", "nobody"),
        "holds no scan": ("--files", str(file), "--out", str(tmp_path)),
    }
    for problem, more in wrong.items():
        monkeypatch.setattr("sys.argv", command(runs, *more)[2:])
        with pytest.raises(SystemExit):
            main()
        assert problem in capsys.readouterr().err
