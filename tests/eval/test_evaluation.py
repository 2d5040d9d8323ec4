from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from scipy.stats import binomtest

from data.generator.tricks import TRICKS
from eval import metrics
from eval.answer import Answer
from eval.evaluation import Evaluation, JudgeRecord, evaluate, load_evaluation, mean_over, quality
from eval.report.report import Report
from eval.robustness import Robustness, Trick
from eval.trial import load_trial
from guard.errors import GuardError
from guard.method import METHODS
from guard.provenance import Provenance
from guard.verdict import Calibration
from tests.eval.conftest import World

NOT_TRIED = Trick(n=0, turned=0, right_before=0, right_after=0)
NOTHING_TRIED = Robustness(
    seed=0,
    tricks={method: dict.fromkeys(TRICKS, NOT_TRIED) for method in METHODS},
    surrounded={method: [] for method in METHODS},
)


def answers(logits: Sequence[float | None]) -> list[Answer]:
    calibrated = [None if logit is None else Calibration().p_violation(logit) for logit in logits]
    return [
        Answer(None if p is None else p >= 0.5, logit, p)
        for logit, p in zip(logits, calibrated, strict=True)
    ]


def test_an_example_without_an_answer_counts_as_wrong_whatever_its_label() -> None:
    result = quality([1, 1, 0, 0], answers([3.0, None, None, -3.0]))
    assert (result.n, result.answered) == (4, 2)
    assert result.accuracy == 0.5
    # the missing positive is a false negative, the missing negative a false positive
    assert result.f1 == pytest.approx(2 * 1 / (2 * 1 + 1 + 1))
    assert result.auroc == 1.0  # over the two that were answered


def test_a_bare_yes_or_no_has_no_ranking_metrics() -> None:
    result = quality([1, 0], [Answer(True), Answer(False)])
    assert result.accuracy == 1.0
    assert (result.auroc, result.auprc, result.recall_at_fpr1, result.ece) == (
        None,
        None,
        None,
        None,
    )


def test_at_the_threshold_by_hand() -> None:
    given = [
        Answer(flagged, 0.0, 0.5, sure)
        for flagged, sure in (
            (True, True),
            (False, True),
            (True, False),
            (False, True),
            (False, True),
        )
    ]
    result = quality([1, 1, 0, 0, 0], given)
    assert (result.false_positive_rate, result.recall) == (pytest.approx(1 / 3), 0.5)
    assert (result.confident, result.accuracy_where_confident) == (0.8, 0.75)
    allowed = quality([0], [Answer(False)])
    assert (
        allowed.false_positive_rate,
        allowed.recall,
        allowed.confident,
        allowed.accuracy_where_confident,
    ) == (0.0, None, None, None)


def test_a_mean_over_some_is_no_mean() -> None:
    assert mean_over([0.5, 1.0]) == 0.75
    assert mean_over([0.5, None]) is None
    assert mean_over([]) is None


def evaluated(world: World, seeds: tuple[int, int] = (0, 1)) -> Evaluation:
    """Eight examples, labels 0 1 0 1 …; LoRA errs once on its first seed, aLoRA three times on its second; the judge refuses once."""
    world.add_rule(examples=8, seeds=seeds)
    trial = load_trial(
        world.runs,
        world.recipe,
        world.recipe.base_revision,
        "medical",
        seeds=seeds,
        rules=world.rules,
    )
    right: list[float | None] = [-2.0, 2.0] * 4
    one_wrong: list[float | None] = [2.0, *right[1:]]
    three_wrong: list[float | None] = [2.0, -2.0, 2.0, *right[3:]]
    return evaluate(
        trial,
        answers([None, *right[1:]]),
        {
            "lora": dict(zip(seeds, (answers(one_wrong), answers(right)), strict=True)),
            "alora": dict(zip(seeds, (answers(right), answers(three_wrong)), strict=True)),
        },
        judge=JudgeRecord(name="base"),
        judge_is_served=True,
        agreement={},
        robustness=NOTHING_TRIED,
        provenance={"commit": "abc", "hardware": "a machine", "versions": {"python": "3"}},
    )


def test_a_method_is_the_mean_over_its_seeds(world: World) -> None:
    result = evaluated(world)
    assert (result.n_test, result.n_violating, result.seeds) == (8, 4, (0, 1))
    lora, alora = result.methods["lora"], result.methods["alora"]
    assert (lora.false_positive_rate, alora.recall) == (pytest.approx(1 / 8), pytest.approx(7 / 8))
    for rate, ci95 in (
        (lora.false_positive_rate, lora.false_positive_rate_ci95),
        (alora.recall, alora.recall_ci95),
    ):
        assert rate is not None and ci95 is not None and 0 <= ci95[0] < rate < ci95[1] <= 1
    assert lora.accuracy == pytest.approx((7 / 8 + 1) / 2)
    assert lora.accuracy_sd == pytest.approx((1 / 8) / 2**0.5)
    assert alora.seeds["1"].accuracy == 5 / 8
    assert alora.f1 == pytest.approx((1 + alora.seeds["1"].f1) / 2)
    assert alora.seeds["0"].accuracy_ci95[1] == pytest.approx(
        binomtest(8, 8).proportion_ci(method="wilson").high
    )
    assert result.methods["judge"].accuracy_sd is None


def test_adapters_are_compared_example_by_example(world: World) -> None:
    result = evaluated(world)
    assert result.alora_minus_lora == ((1, 0, 0, 0, 0, 0, 0, 0), (-1, -1, -1, 0, 0, 0, 0, 0))
    assert result.groups == (0, 0, 1, 1, 2, 2, 3, 3)
    assert result.mcnemar_p_by_seed == {"0": 1.0, "1": pytest.approx(binomtest(0, 3).pvalue)}
    assert (result.mcnemar_seed, result.mcnemar_p) == (0, result.mcnemar_p_by_seed["0"])


@pytest.mark.parametrize(("seeds", "compared"), [((1, 0), 0), ((2, 1), 2)])
def test_the_adapters_compared_are_those_that_are_served_or_else_named(
    world: World, seeds: tuple[int, int], compared: int
) -> None:
    result = evaluated(world, seeds)
    assert (result.mcnemar_seed, result.mcnemar_p) == (
        compared,
        result.mcnemar_p_by_seed[str(compared)],
    )
    assert f"of seed {compared}." in Report((result,)).as_markdown()


def test_a_method_s_interval_knows_that_its_seeds_differ(world: World) -> None:
    world.add_rule(examples=200, seeds=(0, 1))
    trial = load_trial(
        world.runs, world.recipe, world.recipe.base_revision, "medical", rules=world.rules
    )
    right: list[float | None] = [-2.0, 2.0] * 100
    seeds = {0: answers(right), 1: answers(right[::-1])}
    everybody = {"lora": seeds, "alora": {seed: answers(right) for seed in seeds}}
    origin: Provenance = {"commit": "abc", "hardware": "a machine", "versions": {"python": "3"}}
    judge = JudgeRecord(name="base")
    result = evaluate(
        trial,
        answers(right),
        everybody,
        judge=judge,
        judge_is_served=True,
        agreement={},
        robustness=NOTHING_TRIED,
        provenance=origin,
    )  # type: ignore[arg-type]
    assert (
        result.methods["lora"].accuracy_ci95
        == (0.0, 1.0)
        == result.methods["lora"].strata["seen"].accuracy_ci95
    )
    assert result.methods["alora"].accuracy_ci95 == pytest.approx(metrics.wilson_interval(1.0, 200))


def test_strata_are_measured_on_their_own(world: World) -> None:
    strata = evaluated(world).methods["alora"].strata
    # seen are the examples 0 1 4 5, unseen 2 3 6 7; seed 1 errs on 0, 1 and 2
    assert strata["seen"].n == strata["unseen"].n == 4
    assert strata["seen"].accuracy == pytest.approx((1 + 2 / 4) / 2)
    assert strata["unseen"].accuracy == pytest.approx((1 + 3 / 4) / 2)
    # on seed 1 the logits of 0 1 4 5 are 2 -2 -2 2: of four pairs one is right, two are ties
    assert strata["seen"].auroc == pytest.approx((1 + 2 / 4) / 2)


def test_refusals_are_counted_by_method(world: World) -> None:
    result = evaluated(world)
    assert result.refusals == {"judge": 1, "lora": 0, "alora": 0}
    assert result.methods["judge"].answered == 7
    assert result.methods["judge"].accuracy == 7 / 8


def test_an_evaluation_is_read_back_as_it_was_written(world: World, tmp_path: Path) -> None:
    result = evaluated(world)
    result.save(tmp_path / "eval")
    assert load_evaluation(tmp_path / "eval") == result
    (tmp_path / "eval" / "evaluation.json").write_text('{"rule": "medical"}')
    with pytest.raises(GuardError, match=r"missing key 'title'.*Run `make eval"):
        load_evaluation(tmp_path / "eval")


def test_an_evaluation_that_is_missing_or_torn_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "medical" / "eval"
    with pytest.raises(
        GuardError, match=r"evaluation\.json: no such file\. Run `make eval RULE=medical`"
    ):
        load_evaluation(folder)
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text('{"rule": "medi')
    with pytest.raises(GuardError, match=r"not valid JSON.*Run `make eval RULE=medical`"):
        load_evaluation(folder)
