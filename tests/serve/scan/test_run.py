"""The command: killed and gone on with, refused before an engine starts, with Ray and without."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve.scan.run import main
from tests.serve.cards import text_of
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.scan.test_scan import write_rows

ROWS, ROWS_A_PART = 80, 8


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "runs" / "tiny" / "mild" / "alora", "mild", seed=1)
    return tmp_path / "runs"


def command(runs: Path, *more: str) -> list[str]:
    settings = ["--runs", str(runs), "--rows-a-part", str(ROWS_A_PART)]
    return [sys.executable, "-m", "serve.scan.run", *settings, *more]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_killed_process_goes_on_and_says_what_peft_says(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    file = tmp_path / "a.jsonl"
    rows = [{"id": str(number), "messages": messages} for number in range(ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = command(runs, "--files", str(file))
    first = subprocess.Popen(arguments)
    out = runs / "scan"
    while not (out / "part-000000.jsonl").exists():
        assert first.poll() is None, "it ended before it was killed"
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    first.wait()
    times = {path: path.stat().st_mtime_ns for path in out.glob("part-*.jsonl")}
    assert 0 < len(times) < ROWS // ROWS_A_PART  # it was killed amid them
    assert not json.loads((out / "scan.json").read_text())["is_finished"]
    monkeypatch.setattr("sys.argv", arguments[2:])
    main()
    assert f"{ROWS} conversations, 1 rules" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in times} == times  # none is judged again
    lines = [line for path in sorted(out.glob("part-*")) for line in path.read_text().splitlines()]
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
    }
    for problem, more in wrong.items():
        monkeypatch.setattr("sys.argv", command(runs, *more)[2:])
        with pytest.raises(SystemExit):
            main()
        assert problem in capsys.readouterr().err


def test_without_ray_a_cluster_is_refused_with_the_remedy(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "a.jsonl", 18)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("sys.argv", command(runs, "--files", str(file), "--cluster")[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    problem = capsys.readouterr().err
    assert ended.value.code == 2 and "Ray is not installed" in problem
    assert "make scan CLUSTER=1" in problem and not (runs / "scan").exists()
