"""The command: bad input before an engine starts, and the weights that it began with."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.recipe import load_recipe
from guard.weights.card import read_card
from serve.scan.command import judge_all
from serve.scan.parts import PartFolder, manifest_of
from serve.scan.run import main
from serve.selection import ServedPart
from tests.serve.cluster.words_engine import WordsEngine, save_words
from tests.serve.guarded import save_adapter
from tests.serve.scan.test_scan import write_rows


def test_bad_input_is_found_before_an_engine_starts(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    save_adapter(runs / "tiny" / "mild" / "alora", "mild", seed=1)
    monkeypatch.setattr("serve.scan.command.open_engines", lambda _: pytest.fail("it starts"))
    file = write_rows(tmp_path / "a.jsonl", 18)
    wrong = {
        "no file of stored conversations": ("--files", "nowhere.jsonl"),
        "not trained by method": ("--files", str(file), "--rules", "nobody"),
        "holds no scan": ("--files", str(file), "--out", str(tmp_path)),
    }
    for problem, more in wrong.items():
        monkeypatch.setattr("sys.argv", ["scan", "--runs", str(runs), *more])
        with pytest.raises(SystemExit):
            main()
        assert problem in capsys.readouterr().err


def test_a_scan_goes_on_where_it_was_killed_and_then_changes_nothing(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    folder = save_adapter(runs / "tiny" / "mild" / "alora", "mild", seed=1)
    file = write_rows(tmp_path / "a.jsonl", 18)
    engine = WordsEngine({"mild": folder})
    monkeypatch.setattr("serve.scan.command.open_engines", lambda _: nullcontext(engine))
    options = ("--runs", str(runs), "--files", str(file), "--out", str(out), "--rows-a-part", "8")
    monkeypatch.setattr("sys.argv", ["scan", *options])
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise KeyboardInterrupt
        WordsEngine.step(engine)

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main()
    first = [path.name for path in out.glob("part-*")]
    main()
    assert "18 conversations, 1 rules" in capsys.readouterr().out
    assert len(first) < len(list(out.glob("part-*"))) == 3
    main()
    assert "nothing changed" in capsys.readouterr().out and steps < 10


@pytest.mark.parametrize("change", ["weights", "threshold"])
def test_a_rule_that_is_trained_again_while_the_engine_starts_is_not_scanned(
    tmp_path: Path, monkeypatch: MonkeyPatch, change: str
) -> None:
    folders = {name: save_words(tmp_path / name, b"first") for name in ("mild", "stern")}
    parts = [ServedPart(load_recipe("tiny"), "alora", folders)]
    file = write_rows(tmp_path / "a.jsonl", 18)
    folder = PartFolder(tmp_path / "scan", manifest_of(parts, [str(file)], 8))

    def start(_: object) -> nullcontext[WordsEngine]:
        return nullcontext(WordsEngine(folders))

    monkeypatch.setattr("serve.scan.command.open_engines", start)
    if change == "weights":
        save_words(folders["stern"], b"second")
    else:
        read_card(folders["stern"]).model_copy(update={"threshold": 0.4}).save(folders["stern"])
    with pytest.raises(GuardError, match=r"trained again since the scan began \(got stern\)"):
        judge_all(parts, folder)
    assert folder.numbers() == []
    save_words(folders["stern"], b"first")
    assert judge_all(parts, folder).conversations == 18
