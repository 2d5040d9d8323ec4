"""What differs between two versions of an adapter, and when that is a regression."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from eval.compare import compare, main
from guard.errors import GuardError
from tests.eval.conftest import World
from tests.signed import sign


def two_versions(world: World, wrong: dict[int, float], examples: int = 40) -> tuple[Path, Path]:
    """The LoRA as A, right everywhere, and the aLoRA as B with these logits instead."""
    world.add_rule(examples=examples)
    logits = {}
    for number in range(examples):
        logits[f"medical-{number}"] = wrong.get(number, 2.0 if number % 2 else -2.0)
    a = world.runs.adapter("toy", "medical", "lora")
    return a, world.add_adapter("medical", "alora", 0, logits)


def test_flips_are_named_those_that_went_wrong_first(world: World) -> None:
    comparison = compare(*two_versions(world, {4: 3.0, 7: -3.0}))
    named = [comparison.examples[index].id for index in comparison.flips]
    assert named == ["medical-4", "medical-7"]
    text = comparison.as_text()
    assert "2 verdicts differ: 2 now wrong, 0 now right" in text
    assert "WRONG medical-4: label 0, p " in text and "case of medical -5" in text
    assert "0 now wrong, 2 now right" in compare(*comparison.folders[::-1]).as_text()
    assert not comparison.is_regression  # two of forty may be chance


@pytest.mark.parametrize(("errors", "is_regression"), [(10, True), (6, False)])
def test_more_errors_than_chance_explains(world: World, errors: int, is_regression: bool) -> None:
    """Three looks at the same rows have one chance of a false alarm: of six new errors p is .031,
    below .05 and above a third of it.
    """
    a, b = two_versions(world, dict.fromkeys(range(0, 2 * errors, 2), 3.0))
    comparison = compare(a, b)
    assert comparison.is_regression == is_regression == ("REGRESSION" in comparison.as_text())
    assert not compare(b, a).is_regression
    assert is_regression or 0.05 / 3 < comparison.p < 0.05


def test_a_gain_on_one_label_makes_no_loss_good(world: World) -> None:
    world.add_rule(examples=80)
    misses = {f"medical-{n}": -2.0 if n < 40 or n % 2 == 0 else 2.0 for n in range(80)}
    flags = {f"medical-{n}": 2.0 if n < 40 or n % 2 else -2.0 for n in range(80)}
    a = world.add_adapter("medical", "lora", 0, misses)
    comparison = compare(a, world.add_adapter("medical", "alora", 0, flags))
    assert comparison.as_text().count(" 75.0 ") == 2  # as accurate as each other
    assert comparison.is_regression  # twenty new false alarms, twenty more found


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


def test_what_cannot_be_compared_is_refused(world: World, tmp_path: Path) -> None:
    a, b = two_versions(world, {})
    with pytest.raises(GuardError, match=r"no folder with test.jsonl.*DATA="):
        compare(a, b, tmp_path)
    world.add_rule("legal", examples=4)
    with pytest.raises(GuardError, match=r"different rules.*medical and legal"):
        compare(a, world.runs.adapter("toy", "legal", "alora"))
    world.add_adapter("medical", "alora", 0, {"medical-0": 1.0})
    with pytest.raises(GuardError, match=r"39 of 40 test rows.*make train"):
        compare(a, b)


def test_the_command_says_what_differs_and_its_status_says_whether_b_is_worse(
    world: World, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    a, b = two_versions(world, dict.fromkeys(range(0, 20, 2), 3.0))
    for first, second, status, told in (
        (a, b, 1, "REGRESSION"),
        (b, a, 0, "no regression"),
        (a, tmp_path, 2, "error: "),
        ("", "", 2, "make compare A="),  # make compare without A and B
    ):
        monkeypatch.setattr("sys.argv", ["compare", str(first), str(second)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == status and told in (printed.err if status == 2 else printed.out)
