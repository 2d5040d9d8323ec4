"""What differs between two versions of an adapter, and when that is a regression."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from eval.compare import compare, main
from guard.errors import GuardError
from guard.home import ROOT
from tests.eval.conftest import World
from tests.signed import sign


def two_versions(world: World, wrong: dict[int, float], examples: int = 40) -> tuple[Path, Path]:
    """The LoRA as A, right everywhere, and the aLoRA as B with these logits instead."""
    world.add_rule(examples=examples)
    logits = {
        f"medical-{number}": wrong.get(number, 2.0 if number % 2 else -2.0)
        for number in range(examples)
    }
    return world.runs.adapter("toy", "medical", "lora"), world.add_adapter(
        "medical", "alora", 0, logits
    )


def test_flips_are_named_those_that_went_wrong_first(world: World) -> None:
    a, b = two_versions(world, {4: 3.0, 7: -3.0})
    comparison = compare(a, b)
    assert [comparison.examples[index].id for index in comparison.flips] == [
        "medical-4",
        "medical-7",
    ]
    text = comparison.as_text()
    assert "2 verdicts differ: 2 now wrong, 0 now right" in text
    assert "WRONG medical-4: label 0, p " in text
    assert "case of medical -5" in text
    back = compare(b, a)
    assert "0 now wrong, 2 now right" in back.as_text()
    assert not comparison.is_regression  # two of forty may be chance
    assert not back.is_regression


def test_more_errors_than_chance_explains_are_a_regression(world: World) -> None:
    a, b = two_versions(world, dict.fromkeys(range(0, 20, 2), 3.0))
    assert compare(a, b).is_regression
    assert not compare(b, a).is_regression
    assert "REGRESSION" in compare(a, b).as_text()


def test_three_looks_at_the_same_rows_have_one_chance_of_a_false_alarm(world: World) -> None:
    """Six new errors: p = .031, below .05 and above a third of it."""
    a, b = two_versions(world, dict.fromkeys(range(0, 12, 2), 3.0))
    comparison = compare(a, b)
    assert 0.05 / 3 < comparison.p < 0.05
    assert not comparison.is_regression


def test_a_gain_on_one_label_makes_no_loss_good(world: World, tmp_path: Path) -> None:
    world.add_rule(examples=80)
    a = world.add_adapter(
        "medical",
        "lora",
        0,
        {f"medical-{n}": -2.0 if n < 40 or n % 2 == 0 else 2.0 for n in range(80)},
    )
    b = world.add_adapter(
        "medical", "alora", 0, {f"medical-{n}": 2.0 if n < 40 or n % 2 else -2.0 for n in range(80)}
    )
    comparison = compare(a, b)
    assert comparison.as_text().count(" 75.0 ") == 2  # as accurate as each other
    assert comparison.is_regression  # twenty new false alarms, twenty more found


def command(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], *arguments: object
) -> tuple[object, str, str]:
    """Its status and what it printed to stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.mark.slow
def test_the_command_says_what_differs_and_its_status_says_whether_b_is_worse(
    world: World, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    a, b = two_versions(world, dict.fromkeys(range(0, 20, 2), 3.0))
    worse = subprocess.run(
        [sys.executable, "-m", "eval.compare", a, b],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (worse.returncode, "REGRESSION" in worse.stdout) == (1, True), worse.stderr
    status, _, _ = command(monkeypatch, capsys, b, a)
    assert status == 0
    status, _, error = command(monkeypatch, capsys, a, tmp_path)
    assert status == 2
    assert error.startswith("error: ")
    status, _, error = command(monkeypatch, capsys, "", "")  # make compare without A and B
    assert status == 2
    assert "make compare A=" in error


def test_other_training_rows_are_no_obstacle(world: World, tmp_path: Path) -> None:
    """Wherever below the runs folder they lie; elsewhere the data are named."""
    a, b = two_versions(world, {4: 3.0})
    sign(a, data_hash="other rows")
    before = world.runs.root / "toy" / "medical" / "before" / "lora"
    before.parent.mkdir()
    a.rename(before)
    assert len(compare(before, b).flips) == 1
    away = before.rename(tmp_path / "away")
    with pytest.raises(GuardError, match="no test rows of medical in any folder above"):
        compare(away, b)
    assert len(compare(away, b, world.runs.data("medical")).flips) == 1
    sign(away, test_sha256="other")
    with pytest.raises(GuardError, match="its test rows are not those in"):
        compare(away, b, world.runs.data("medical"))


def test_data_that_are_no_folder_of_test_rows_are_named(world: World, tmp_path: Path) -> None:
    world.add_rule()
    folder = world.runs.adapter("toy", "medical", "lora")
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    for data in (rows, tmp_path):
        with pytest.raises(GuardError, match=r"no folder with test.jsonl.*DATA="):
            compare(folder, folder, data)


def test_what_cannot_be_compared_is_refused(world: World) -> None:
    a, b = two_versions(world, {})
    world.add_rule("legal", examples=4)
    with pytest.raises(GuardError, match=r"different rules.*medical and legal"):
        compare(a, world.runs.adapter("toy", "legal", "alora"))
    world.add_adapter("medical", "alora", 0, {"medical-0": 1.0})
    with pytest.raises(GuardError, match=r"39 of 40 test rows.*make train"):
        compare(a, b)
