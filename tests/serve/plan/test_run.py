"""The command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serve.plan.plan_file import load_plan
from serve.plan.run import OPTIONS, main, parser, plan_options
from tests.serve.plan.deployments import calibrated

SMALL = "--rate 5 --rules-a-check 1,2 --fleet 3 --lengths 100,200 --checks 100 --p95 900"


def run(monkeypatch: pytest.MonkeyPatch, runs: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--runs", str(runs), *words])
    main()


def test_every_option_replaces_a_key_that_exists() -> None:
    content = load_plan("tiny_here", {}).model_dump()
    for key, _, _ in OPTIONS.values():
        section, _, inner = key.rpartition(".")
        assert inner in (content[section] if section else content), key


def test_only_what_is_given_replaces_a_key() -> None:
    arguments = parser().parse_args(["--rate", "5", "--rules-a-check", "1,2"])
    assert plan_options(arguments) == {"traffic.rate": 5.0, "traffic.rules_a_check": [1, 2]}


def test_a_plan_is_printed_kept_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tmp_path)
    run(monkeypatch, tmp_path, *SMALL.split())
    printed = capsys.readouterr().out
    assert "a million verdicts" in printed and str(tmp_path / "plan.json") in printed
    assert (tmp_path / "plan.json").is_file() and (tmp_path / "plan.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "'traffic.rate'"),
        (["--plan", "none"], "no such file"),
        (["--trace", "none.jsonl"], "no such trace"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    calibrated(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, *words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
