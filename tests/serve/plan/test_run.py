"""The command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.plan.run import main, replaced_keys
from tests.serve.plan.on_paper import calibrated

SMALL = "traffic.rate=5 traffic.rules_a_check=[1,2] traffic.rules=3 checks=100 p95_ms=900"


def run(monkeypatch: pytest.MonkeyPatch, runs: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--runs", str(runs), *words])
    main()


def test_values_are_numbers_lists_and_words() -> None:
    words = ["traffic.rate=5", "traffic.rules_a_check=[1, 2]", "device=l4", "price_source=a=b"]
    assert replaced_keys(words) == {
        "traffic.rate": 5,
        "traffic.rules_a_check": [1, 2],
        "device": "l4",
        "price_source": "a=b",
    }
    for word in ("rate", "=5"):
        with pytest.raises(GuardError, match="not a key of the plan with its value"):
            replaced_keys([word])


def test_a_plan_is_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tmp_path)
    run(monkeypatch, tmp_path, *SMALL.split())
    printed = capsys.readouterr().out
    assert "a million verdicts" in printed and str(tmp_path / "plan.json") in printed
    assert (tmp_path / "plan.json").is_file()


def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "--trace", "none.jsonl")
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "no such trace" in error and error.count("\n") == 1
