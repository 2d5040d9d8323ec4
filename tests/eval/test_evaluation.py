from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from eval import metrics
from eval.answers import Answer
from eval.bag_of_words import BagVariant
from eval.evaluation import Evaluation, evaluate
from eval.judge.answer import Judgement, JudgeRecord
from tests.eval.conftest import WITH_HEAD, World, answers

BAG = BagVariant(view="last turn", ngrams="words 1-2", c=1.0, validation_auroc=0.5)
RIGHT: list[float | None] = [-2.0, 2.0] * 4  # of eight examples, labels 0 1 0 1 …


def measured(
    world: World,
    methods: Mapping[str, Mapping[int, Sequence[Answer]]],
    judged: Sequence[Answer] | None = None,
    seeds: Sequence[int] | None = None,
) -> Evaluation:
    """The evaluation of the rule `medical` with these answers."""
    trial = world.trial(seeds=seeds)
    judged = judged or answers(RIGHT * (len(trial.examples) // 8))
    return evaluate(
        trial,
        Judgement(list(judged), JudgeRecord(name="base")),
        (BAG, judged),  # a bag of words that answers as the judge does
        methods,
        agreement={},
        provenance={"commit": "abc", "hardware": "a machine", "versions": {"python": "3"}},
    )


def evaluated(world: World, seeds: tuple[int, int] = (0, 1)) -> Evaluation:
    """LoRA errs once on its first seed, aLoRA three times on its second; the judge refuses once."""
    world.add_rule(examples=8, seeds=seeds)
    lora = (answers([2.0, *RIGHT[1:]]), answers(RIGHT))
    alora = (answers(RIGHT), answers([2.0, -2.0, 2.0, *RIGHT[3:]]))
    methods = {"lora": dict(zip(seeds, lora)), "alora": dict(zip(seeds, alora))}  # noqa: B905
    return measured(world, methods, answers([None, *RIGHT[1:]]), seeds)


def test_a_method_is_the_mean_over_its_seeds(world: World) -> None:
    result = evaluated(world)
    assert (result.n_test, result.n_violating, result.seeds) == (8, 4, (0, 1))
    lora, alora = result.methods["lora"], result.methods["alora"]
    for rate, expected, ci95 in (
        (lora.metrics["false_positive_rate"], 1 / 8, lora.false_positive_rate_ci95),
        (alora.metrics["recall"], 7 / 8, alora.recall_ci95),
    ):
        assert rate == pytest.approx(expected)
        assert ci95 is not None and 0 <= ci95[0] < expected < ci95[1] <= 1
    assert lora.accuracy == pytest.approx((7 / 8 + 1) / 2)
    assert lora.accuracy_sd == pytest.approx((1 / 8) / 2**0.5)
    assert alora.seeds["1"].accuracy == 5 / 8
    assert alora.metrics["f1"] == pytest.approx((1 + (alora.seeds["1"].metrics["f1"] or 0)) / 2)
    assert alora.seeds["0"].accuracy_ci95 == pytest.approx(metrics.wilson_interval(1.0, 8))
    outcomes = result.difference("alora", "lora")  # example by example
    assert outcomes is not None
    by_seed = [[1, 0, 0, 0, 0, 0, 0, 0], [-1, -1, -1, 0, 0, 0, 0, 0]]
    assert outcomes.values.tolist() == by_seed
    assert outcomes.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_methods_are_compared_on_all_seeds_that_they_have(world: World) -> None:
    """The head has one answer, which is compared with every seed."""
    world.recipe = WITH_HEAD
    world.add_rule(examples=8, seeds=(0, 1, 2))
    right, wrong = answers(RIGHT), answers([2.0, *RIGHT[1:]])
    methods = {"lora": {0: right, 1: wrong}, "alora": {1: right, 2: right}, "head": {0: right}}
    result = measured(world, methods)
    by_pair = {}
    for pair in (("alora", "lora"), ("head", "lora"), ("head", "alora")):
        outcomes = result.difference(*pair)
        assert outcomes is not None
        by_pair[pair] = outcomes.values[:, 0].tolist()
    assert by_pair == {("alora", "lora"): [1], ("head", "lora"): [0, 1], ("head", "alora"): [0, 0]}
    apart = measured(world, methods | {"alora": {2: right}})
    assert apart.difference("alora", "lora") is None


def test_a_method_s_interval_knows_that_its_seeds_differ(world: World) -> None:
    world.add_rule(examples=200, seeds=(0, 1))
    right = answers(RIGHT * 25)
    lora = {0: right, 1: answers((RIGHT * 25)[::-1])}
    methods = measured(world, {"lora": lora, "alora": dict.fromkeys(lora, right)}).methods
    unsure = methods["lora"]
    assert unsure.accuracy_ci95 == (0.0, 1.0) == unsure.strata["seen"].accuracy_ci95
    assert methods["alora"].accuracy_ci95 == pytest.approx(metrics.wilson_interval(1.0, 200))
