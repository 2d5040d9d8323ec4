"""A retest's table, of made-up figures."""

from __future__ import annotations

from pathlib import Path

from eval.retest.report import DrawAccuracy, Retest, RetestedRule


def toy_accuracy(first: float, second: float, half: float) -> DrawAccuracy:
    change = second - first
    return DrawAccuracy(
        first=first,
        first_ci95=(first - 0.05, first + 0.05),
        second=second,
        second_ci95=(second - 0.05, second + 0.05),
        change=change,
        change_ci95=(change - half, change + half),
    )


def toy_retest() -> Retest:
    """One rule of a method that changed, by 25 points, and one that did not, without an ECE."""
    changed, unchanged = toy_accuracy(0.75, 0.5, 0.125), toy_accuracy(0.75, 0.75, 0.125)
    rule = RetestedRule(
        n_first=40,
        n_second=34,
        dropped=6,
        seeds=(0,),
        methods={"lora": unchanged, "alora": changed},
        strata={"seen": {"lora": unchanged, "alora": unchanged}},
        ece={"lora": None, "alora": 0.0625},
        ece_expected={"lora": None, "alora": 0.03125},
    )
    return Retest(
        model="toy",
        data="FOLDER",
        left_out=("legal: no second test set",),
        rules={"medical": rule},
        mean_change={"lora": 0.0, "alora": -0.25},
        mean_change_ci95={"lora": (-0.125, 0.125), "alora": (-0.375, -0.125)},
        mean_ece=rule.ece,
        mean_ece_expected=rule.ece_expected,
        commit="abc1234",
        hardware="two cores",
        versions={},
    )


def test_the_table_has_rules_with_their_strata_then_means() -> None:
    rows = []
    for line in toy_retest().as_markdown().splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    by_name = {(row[0], row[1]): row[2:] for row in rows}
    assert by_name["medical", "alora"][2:] == ["-25.0 [-37.5, -12.5]", "34", "6"]
    assert by_name["medical", "alora"][0].startswith("75.0 ")
    assert by_name["", "alora, seen"][2] == "+0.0 [-12.5, +12.5]"
    assert by_name["**mean**", "alora"][1] == "no change within its interval: 0 of 1"
    assert by_name["**mean**", "alora"][2] == "**-25.0 [-37.5, -12.5]**"
    assert by_name["**mean**", "lora"][1] == "no change within its interval: 1 of 1"


def test_below_the_table_stand_the_calibration_errors_that_there_are_and_what_is_left_out() -> None:
    *_, ece, _, left_out = toy_retest().as_markdown().splitlines()
    assert ece.endswith("mean over rules and seeds: alora 0.062 (expected 0.031)")
    assert left_out == "Left out: legal: no second test set"


def test_figures_and_table_are_saved_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "retest.json"
    toy_retest().save(path)
    assert Retest.model_validate_json(path.read_text()) == toy_retest()
    assert path.with_suffix(".md").read_text() == toy_retest().as_markdown() + "\n"
