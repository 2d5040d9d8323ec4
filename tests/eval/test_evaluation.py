from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from scipy.stats import binomtest

from data.generator.tricks import TRICKS
from eval import metrics
from eval.answer import Answer
from eval.bag_of_words.baseline import BagVariant
from eval.evaluation import Evaluation, TrialAnswers, evaluate, load_evaluation
from eval.judge.record import Judgement, JudgeRecord
from eval.report.report import Report
from eval.robustness import Robustness, TrickFlips
from eval.trial import load_trial
from guard.errors import GuardError
from guard.machine.provenance import Provenance
from tests.eval.conftest import WITH_HEAD, World, answers

NOT_TRIED = TrickFlips(n=0, flips=0, right_before=0, right_after=0)
NOTHING_TRIED = Robustness(
    seeds=(0,),
    tricks={method: dict.fromkeys(TRICKS, NOT_TRIED) for method in ("lora", "alora")},
)


def contenders(
    judged: Sequence[Answer], methods: Mapping[str, Mapping[int, Sequence[Answer]]]
) -> TrialAnswers:
    """The served base as judge, a bag of words that answers as it does, and the methods."""
    bag = BagVariant(view="last turn", ngrams="words 1-2", c=1.0, validation_auroc=0.5)
    judgement = Judgement(list(judged), JudgeRecord(name="base"))
    return TrialAnswers(judgement, True, (bag, judged), methods)


def evaluated(world: World, seeds: tuple[int, int] = (0, 1)) -> Evaluation:
    """Eight examples, labels 0 1 0 1 …; LoRA errs once on its first seed, aLoRA three times on its
    second; the judge refuses once.
    """
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
        contenders(
            answers([None, *right[1:]]),
            {
                "lora": dict(zip(seeds, (answers(one_wrong), answers(right)), strict=True)),
                "alora": dict(zip(seeds, (answers(right), answers(three_wrong)), strict=True)),
            },
        ),
        agreement={},
        robustness=NOTHING_TRIED,
        provenance={"commit": "abc", "hardware": "a machine", "versions": {"python": "3"}},
    )


def test_a_method_is_the_mean_over_its_seeds(world: World) -> None:
    result = evaluated(world)
    assert (result.n_test, result.n_violating, result.seeds) == (8, 4, (0, 1))
    lora, alora = result.methods["lora"], result.methods["alora"]
    assert (lora.metrics["false_positive_rate"], alora.metrics["recall"]) == (
        pytest.approx(1 / 8),
        pytest.approx(7 / 8),
    )
    for rate, ci95 in (
        (lora.metrics["false_positive_rate"], lora.false_positive_rate_ci95),
        (alora.metrics["recall"], alora.recall_ci95),
    ):
        assert rate is not None and ci95 is not None and 0 <= ci95[0] < rate < ci95[1] <= 1
    assert lora.accuracy == pytest.approx((7 / 8 + 1) / 2)
    assert lora.accuracy_sd == pytest.approx((1 / 8) / 2**0.5)
    assert alora.seeds["1"].accuracy == 5 / 8
    assert alora.metrics["f1"] == pytest.approx((1 + alora.seeds["1"].metrics["f1"]) / 2)
    assert alora.seeds["0"].accuracy_ci95[1] == pytest.approx(
        binomtest(8, 8).proportion_ci(method="wilson").high
    )
    assert result.methods["judge"].accuracy_sd is None


def test_methods_are_compared_example_by_example(world: World) -> None:
    result = evaluated(world)
    difference = result.differences["alora_minus_lora"]
    outcomes = result.outcomes("alora_minus_lora")
    by_seed = [[1, 0, 0, 0, 0, 0, 0, 0], [-1, -1, -1, 0, 0, 0, 0, 0]]
    assert outcomes.values.tolist() == by_seed
    assert outcomes.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    p_by_seed = {"0": 1.0, "1": pytest.approx(binomtest(0, 3).pvalue)}
    assert difference.mcnemar_p_by_seed == p_by_seed
    assert (difference.mcnemar_seed, difference.mcnemar_p) == (0, difference.mcnemar_p_by_seed["0"])


def test_mcnemar_s_pairs_are_of_the_same_example(world: World) -> None:
    """Each method errs twice, on other examples: four discordant pairs, and none if sorted."""
    world.add_rule(examples=8)
    trial = load_trial(
        world.runs, world.recipe, world.recipe.base_revision, "medical", rules=world.rules
    )
    right: list[float | None] = [-2.0, 2.0] * 4
    first_wrong = answers([2.0, -2.0, 2.0, -2.0, *right[4:]])
    last_wrong = answers([*right[:6], 2.0, -2.0])
    result = evaluate(
        trial,
        contenders(answers(right), {"lora": {0: last_wrong}, "alora": {0: first_wrong}}),
        agreement={},
        robustness=NOTHING_TRIED,
        provenance={"commit": "abc", "hardware": "a machine", "versions": {}},
    )
    expected = binomtest(2, 6).pvalue
    assert result.differences["alora_minus_lora"].mcnemar_p == pytest.approx(expected)


@pytest.mark.parametrize(("seeds", "compared"), [((1, 0), 0), ((2, 1), 2)])
def test_the_weights_compared_are_those_that_are_served_or_else_named(
    world: World, seeds: tuple[int, int], compared: int
) -> None:
    result = evaluated(world, seeds)
    difference = result.differences["alora_minus_lora"]
    assert difference.mcnemar_seed == compared
    assert difference.mcnemar_p == difference.mcnemar_p_by_seed[str(compared)]
    assert f"of seed {compared}." in Report((result,)).as_markdown()


def test_every_two_methods_are_compared_on_all_seeds_that_they_have(world: World) -> None:
    """The head has one answer, which is compared with every seed."""
    world.recipe = WITH_HEAD
    world.add_rule(examples=8, seeds=(0, 1))
    right = answers([-2.0, 2.0] * 4)

    def compared(seeds: tuple[int, ...]) -> dict[str, list[str]]:
        revision = world.recipe.base_revision
        trial = load_trial(
            world.runs, world.recipe, revision, "medical", seeds=seeds, rules=world.rules
        )
        methods = {"lora": dict.fromkeys(seeds, right), "alora": dict.fromkeys(seeds, right)}
        result = evaluate(
            trial,
            contenders(right, methods | {"head": {0: right}}),
            agreement={},
            robustness=NOTHING_TRIED,
            provenance={"commit": "abc", "hardware": "a machine", "versions": {}},
        )
        return {name: list(it.mcnemar_p_by_seed) for name, it in result.differences.items()}

    for seeds in ((0, 1), (1,)):
        names = ("alora_minus_lora", "head_minus_lora", "head_minus_alora")
        assert compared(seeds) == {name: list(map(str, seeds)) for name in names}


def test_a_method_s_interval_knows_that_its_seeds_differ(world: World) -> None:
    world.add_rule(examples=200, seeds=(0, 1))
    trial = load_trial(
        world.runs, world.recipe, world.recipe.base_revision, "medical", rules=world.rules
    )
    right: list[float | None] = [-2.0, 2.0] * 100
    seeds = {0: answers(right), 1: answers(right[::-1])}
    methods = {"lora": seeds, "alora": {seed: answers(right) for seed in seeds}}
    origin: Provenance = {"commit": "abc", "hardware": "a machine", "versions": {"python": "3"}}
    result = evaluate(
        trial,
        contenders(answers(right), methods),
        agreement={},
        robustness=NOTHING_TRIED,
        provenance=origin,
    )
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
    assert strata["seen"].metrics["auroc"] == pytest.approx((1 + 2 / 4) / 2)


def test_the_answered_rows_are_those_of_the_worst_seed_and_intervals_count_the_others_as_wrong(
    world: World,
) -> None:
    world.add_rule(examples=8, seeds=(0, 1))
    trial = load_trial(
        world.runs, world.recipe, world.recipe.base_revision, "medical", rules=world.rules
    )
    right: list[float | None] = [-2.0, 2.0] * 4
    seeds = {0: answers(right), 1: answers([*right[:5], None, None, None])}
    result = evaluate(
        trial,
        contenders(answers(right), {"lora": seeds, "alora": dict.fromkeys(seeds, answers(right))}),
        agreement={},
        robustness=NOTHING_TRIED,
        provenance={"commit": "abc", "hardware": "a machine", "versions": {}},
    )
    lora = result.methods["lora"]
    assert (lora.answered, lora.seeds["0"].answered, lora.seeds["1"].answered) == (5, 8, 5)
    assert lora.accuracy == pytest.approx((1 + 5 / 8) / 2)
    assert lora.strata["unseen"].accuracy == pytest.approx((1 + 2 / 4) / 2)
    second_seed = result.outcomes("alora_minus_lora").values[1]
    assert second_seed.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


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
    folder = tmp_path / "toy" / "medical" / "eval"
    with pytest.raises(
        GuardError, match=r"evaluation\.json: no such file\. Run `make eval RULE=medical MODEL=toy`"
    ):
        load_evaluation(folder)
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text('{"rule": "medi')
    with pytest.raises(GuardError, match=r"not valid JSON.*Run `make eval RULE=medical MODEL=toy`"):
        load_evaluation(folder)
