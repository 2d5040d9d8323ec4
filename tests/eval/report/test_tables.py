from __future__ import annotations

from pytest import MonkeyPatch

from eval.agreement import Agreement
from eval.quality import METRICS, Metric
from eval.report import tables
from eval.report.report import Report
from guard.conversation.example import REAL
from guard.twins import TwinRate
from tests.eval.conftest import World
from tests.eval.test_evaluation import evaluated


def rows(table: str) -> list[list[str]]:
    """The cells of each row, the head first."""
    lines = [line for line in table.splitlines() if "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_contender_has_a_row_and_the_rule_stands_in_its_first(world: World) -> None:
    report = Report((evaluated(world),))
    _, *body = rows(tables.quality_table(report))
    contenders = ["judge", "bag of words", "LoRA", "aLoRA"]
    assert [row[1] for row in body] == contenders
    assert [row[0] for row in body] == ["medical (4 of 8)", "", "", ""]
    head, *body = rows(tables.strata_table(report))
    assert [row[head.index("method")] for row in body[:4]] == contenders
    assert [row[:3] for row in body[:2]] == [["medical", "seen", "4"], ["", "", ""]]
    assert body[3][head.index("accuracy")].startswith("75.0 [")
    assert body[4][:3] == ["medical", "unseen", "4"]
    head, bag, *_ = rows(tables.threshold_table(report))
    assert (bag[1], bag[head.index("confident")]) == ("bag of words", "")  # it has none
    assert bag[head.index("recall")].startswith("100.0 [")
    assert bag[head.index("FPR on twins")] == "too few (0)"


def test_a_metric_that_is_an_entry_is_a_column(world: World, monkeypatch: MonkeyPatch) -> None:
    mine = Metric("share flagged", lambda it: float(it.decisions.mean()), in_strata=True)
    monkeypatch.setitem(METRICS, "flagged", mine)
    report = Report((evaluated(world),))
    head, judge, *_ = rows(tables.quality_table(report))
    assert judge[head.index("share flagged")] == "0.625"
    assert "share flagged" in rows(tables.strata_table(report))[0]
    assert '"flagged": 0.625' in report.as_json()


def test_rows_of_one_s_own_beside_generated_ones_have_rates_of_their_own(world: World) -> None:
    report = Report((evaluated(world),))
    head, *body = rows(tables.threshold_table(report))
    assert not any("own rows" in row[1] for row in body)
    evaluation = report.evaluations[0]
    alora = evaluation.methods["alora"]
    seen = alora.strata["seen"]
    twins = TwinRate(n=180, fpr=0.05, fpr_ci95=(0.02, 0.091))
    changed = alora.model_copy(update={"strata": {REAL: seen}, "twins": twins})
    methods = evaluation.methods | {"alora": changed}
    mixed = Report((evaluation.model_copy(update={"methods": methods}),))
    head, *body = rows(tables.threshold_table(mixed))
    assert body[-2][head.index("FPR on twins")] == "5.0 [2.0, 9.1] of 180"
    own = body[-1]
    assert own[:2] == ["medical", f"aLoRA, {seen.n} own rows"]
    for name in ("false_positive_rate", "recall"):
        share = seen.metrics[name]
        assert share is not None
        assert own[head.index(METRICS[name].label)] == f"{100 * share:.1f}"


def test_a_composed_rule_stands_beside_its_parents_and_what_its_rows_trained(world: World) -> None:
    evaluation = evaluated(world)
    assert tables.composition_table(Report((evaluation,))) == ""
    figures: dict[str, object] = {"accuracy": 0.5, "accuracy_ci95": (0.4, 0.6), "auroc": 0.75}
    figures["auroc_ci95"] = (0.7, 0.8)
    adapters = {"composed": figures, "own": figures | {"accuracy": 0.25}}
    measured = {"n": 8, "adapters": adapters, "interference": 0.125, "interference_wrong": 1}
    measured["interference_ci95"] = (0.1, 0.2)
    others = {"rule": "composed", "composition": {"lora": measured}}
    table = tables.composition_table(Report((evaluation, evaluation.model_copy(update=others))))
    _, composed, own, trained = rows(table)
    assert composed[:3] == ["composed (8 rows)", "LoRA", "composed"]
    assert composed[3:] == ["50.0 [40.0, 60.0]", "0.750 [0.700, 0.800]", "12.5 [10.0, 20.0]", "1"]
    assert (own[2], own[3][:4], own[5]) == ("own", "25.0", "")
    assert (trained[2], trained[3][:4]) == ("medical, trained", "93.8")


def test_the_distance_from_peft_is_shown_by_method(world: World) -> None:
    measured = {"max_difference": 0.00031, "mean_difference": 0.00012, "tolerance": 0.001}
    agreement = Agreement(prompts=16, label_flips=2, beyond_tolerance=0, **measured)
    evaluation = evaluated(world).model_copy(update={"agreement": {"alora": agreement}})
    _, row = rows(tables.agreement_table(Report((evaluation,))))
    assert row == ["medical", "aLoRA", "16", "0.00031", "0.00012", "2", "0.001", "0"]
