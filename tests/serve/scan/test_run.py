"""The command: killed and gone on with, refused before an engine starts, with Ray and without."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from guard.card import read_card
from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench.cluster.words import WordsEngine, save_words
from serve.scan.parts import PartFolder
from serve.scan.run import judge_all, main, manifest_of
from serve.selection import ServedPart
from tests.serve.cards import text_of
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.scan.test_scan import write_rows


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "runs" / "tiny" / "mild" / "alora", "mild", seed=1)
    return tmp_path / "runs"


def command(runs: Path, *more: str) -> list[str]:
    settings = ["--runs", str(runs), "--rows-a-part", "8"]
    return [sys.executable, "-m", "serve.scan.run", *settings, *more]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
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


def test_a_data_set_that_has_changed_is_another_scan(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", 18)
    before = manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl")
    assert manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl") == before
    write_rows(file, 19)
    after = manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl")
    PartFolder(tmp_path / "out", before)
    with pytest.raises(GuardError, match="changed: sources"):
        PartFolder(tmp_path / "out", after)


@pytest.mark.parametrize("change", ["weights", "threshold"])
def test_a_rule_that_is_trained_again_while_the_engine_starts_is_not_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folders = {name: save_words(tmp_path / name, b"first") for name in ("mild", "stern")}
    parts = [ServedPart(load_recipe("tiny"), "alora", folders)]
    file = write_rows(tmp_path / "a.jsonl", 18)
    folder = PartFolder(tmp_path / "scan", manifest_of(parts, [str(file)], 8, "jsonl"))

    def start(_: object) -> nullcontext[WordsEngine]:
        return nullcontext(WordsEngine(folders))

    monkeypatch.setattr("serve.scan.run.start_engine", start)
    if change == "weights":
        save_words(folders["stern"], b"second")
    else:
        read_card(folders["stern"]).model_copy(update={"threshold": 0.4}).save(folders["stern"])
    with pytest.raises(GuardError, match=r"trained again since the scan began \(got stern\)"):
        judge_all(parts, folder)
    assert folder.numbers() == []
    save_words(folders["stern"], b"first")
    assert judge_all(parts, folder).conversations == 18


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


def test_actors_are_of_a_cluster(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", command(runs, "--files", "a.jsonl", "--actors", "2")[2:])
    with pytest.raises(SystemExit):
        main()
    assert "CLUSTER=1" in capsys.readouterr().err
