"""The command: what PEFT says, once, and bad input before an engine starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from serve.scan.run import main
from tests.serve.cards import text_of
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.scan.test_scan import write_rows

ROWS, ROWS_A_PART = 24, 8


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "runs" / "tiny" / "mild" / "alora", "mild", seed=1)
    return tmp_path / "runs"


def command(runs: Path, *more: str) -> list[str]:
    return ["scan", "--runs", str(runs), "--rows-a-part", str(ROWS_A_PART), *more]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_scan_says_what_peft_says_and_is_made_once(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    file = tmp_path / "a.jsonl"
    rows = [{"id": str(number), "messages": messages} for number in range(ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.argv", command(runs, "--files", str(file)))
    main()
    assert f"{ROWS} conversations, 1 rules" in capsys.readouterr().out
    lines: list[str] = []
    for part in sorted((runs / "scan").glob("part-*")):
        lines += part.read_text().splitlines()
    verdicts = [json.loads(line) for line in lines]
    assert [verdict["row"] for verdict in verdicts] == list(range(ROWS))
    logit = peft_logit(CONVERSATION, text_of("mild"), runs / "tiny" / "mild" / "alora")
    p_violation = 1 / (1 + 2.718281828 ** -(logit / 2))
    for verdict in verdicts:  # in the dtype of this machine
        assert verdict["p_violation"] == pytest.approx(p_violation, abs=0.02)
    main()
    assert capsys.readouterr().out.startswith("nothing changed")


def test_bad_input_is_found_before_an_engine_starts(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve.scan.command.open_engines", lambda _: pytest.fail("it starts"))
    file = write_rows(tmp_path / "a.jsonl", 18)
    wrong = {
        "no file of stored conversations": ("--files", "nowhere.jsonl"),
        "not trained by method": ("--files", str(file), "--rules", "nobody"),
        "holds no scan": ("--files", str(file), "--out", str(tmp_path)),
        "make scan CLUSTER=1": ("--files", str(file), "--cluster"),
    }
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    for problem, more in wrong.items():
        monkeypatch.setattr("sys.argv", command(runs, *more))
        with pytest.raises(SystemExit):
            main()
        assert problem in capsys.readouterr().err
