"""From kept logits to a report: which figure belongs to which method, size and origin."""

from __future__ import annotations

import pytest

from eval.study.report import StudyReport
from eval.study.run import report_study
from guard.errors import GuardError
from tests.eval.study.conftest import StudyWorld, study_world


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyWorld, StudyReport]:
    made = study_world(tmp_path_factory.mktemp("transfer"), "transfer")
    return made, report_study(made.folder, [made.world.recipe], made.world.rules)


def test_real_and_generated_rows_are_measured_apart(
    reported: tuple[StudyWorld, StudyReport],
) -> None:
    _, report = reported
    assert report.tested == {"real": 24, "generated": 24}
    assert report.violating == {"real": 12, "generated": 12}
    for method, wrong in (("lora", 2), ("alora", 6)):
        for step, rows in enumerate((0, 20)):
            # Each of the wrong rows stands below all allowed ones, the others above.
            right = (12 - (wrong - step)) / 12
            assert report.cell(rows, method).auroc == pytest.approx(right)
            assert report.cell(rows, method).by_seed == pytest.approx((right, right))
            assert report.cell(rows, method, "generated").auroc == 1.0
    assert report.cell(0, "bag_of_words").auroc == 1.0


def test_differences_are_of_every_two_methods_the_later_minus_the_earlier(
    reported: tuple[StudyWorld, StudyReport],
) -> None:
    _, report = reported
    by_pair = {
        (each.minuend, each.subtrahend): each
        for each in report.differences
        if (each.rows, each.origin) == (0, "real")
    }
    assert set(by_pair) == {
        ("lora", "bag_of_words"),
        ("alora", "bag_of_words"),
        ("alora", "lora"),
    }
    assert by_pair["alora", "lora"].difference == pytest.approx(-4 / 12)
    assert by_pair["alora", "lora"].is_clear


def test_a_report_lies_in_the_study_s_folder(reported: tuple[StudyWorld, StudyReport]) -> None:
    made, _ = reported
    assert {"toy.json", "toy.md", "toy.png"} <= {path.name for path in made.folder.iterdir()}


def test_several_bases_stand_side_by_side(curve: StudyWorld) -> None:
    toy = curve.world.recipe
    curve.world.recipe = toy.only("lora").model_copy(update={"name": "second"})
    curve.write({"lora": 4})
    report = report_study(curve.folder, [toy, curve.world.recipe], curve.world.rules)
    assert report.methods == ["bag_of_words", "toy/lora", "toy/alora", "second/lora"]
    assert report.cell(20, "toy/lora").auroc == pytest.approx(10 / 12)
    assert report.cell(20, "second/lora").auroc == pytest.approx(8 / 12)
    pairs = {(difference.minuend, difference.subtrahend) for difference in report.differences}
    assert ("second/lora", "toy/lora") in pairs and len(pairs) == 6
    text = (curve.folder / "toy_second.md").read_text()
    assert "on toy and second" in text and "second LoRA minus toy LoRA" in text


def test_a_study_that_was_not_trained_is_refused(curve: StudyWorld) -> None:
    (curve.world.runs.adapter("toy", "medical", "lora", 1) / "card.json").unlink()
    with pytest.raises(GuardError):
        report_study(curve.folder, [curve.world.recipe], curve.world.rules)
    assert not (curve.folder / "toy.json").exists()
