"""Several rules put to a second draw: means over them, and what the report says of where it is."""

from __future__ import annotations

import shutil

import pytest

from data.build import build
from data.generator.generate import Counts
from eval.retest.run import retest
from guard.conversation.example import GENERATOR, read_examples
from guard.rule import RULES, load_rule
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World, evidence
from tests.eval.retest.second_draw import second_set


def test_the_means_are_over_the_rules(world: World) -> None:
    """One rule's aLoRA learnt the first set by heart, the other's did not."""
    world.add_rule("medical", examples=40)
    world.add_rule("legal", examples=40)

    def by_heart(request: ScoreRequest) -> float:
        is_known = "again" not in request.messages[0].content or "alora" not in str(request.adapter)
        return evidence(request.messages) if is_known else 1.0

    folder = second_set(world, "medical", words="again")
    second_set(world, "legal")
    engine = ToyEngine(by_heart)
    retested = retest(
        "medical,legal",
        world.recipe,
        folder,
        runs=world.runs,
        rules=world.rules,
        open_predictor=engine.open,
    )
    assert retested.mean_change == {"lora": 0.0, "alora": -0.25}
    assert retested.mean_change_ci95["alora"][1] < 0
    eces = [rule.ece["alora"] or 0.0 for rule in retested.rules.values()]
    assert len(eces) == 2 and eces[0] != eces[1]
    assert retested.mean_ece["alora"] == pytest.approx(sum(eces) / 2)
    assert retested.data == str(folder) and retested.left_out == ()
    assert "no change within its interval: 1 of 2" in retested.as_markdown()
    assert len(engine.opened_with) == 1  # one engine answers for all rules


@pytest.mark.slow
def test_the_generator_draws_again_where_the_first_set_is_its_own_and_other_rules_are_left_out(
    world: World,
) -> None:
    shutil.copy(RULES / "refund_promise.yaml", world.rules)
    build(
        load_rule("refund_promise"),
        GENERATOR,
        Counts(40, 20, 40),
        0,
        "keep",
        world.runs.data("refund_promise"),
    )
    rows = read_examples(world.runs.data("refund_promise") / "test.jsonl")
    for method in world.recipe.methods:
        world.add_adapter("refund_promise", method, 0, {row.id: 0.0 for row in rows})
    world.add_rule("medical", examples=40)
    engine = ToyEngine(lambda request: 1.0)
    retested = retest(
        "all", world.recipe, runs=world.runs, rules=world.rules, open_predictor=engine.open
    )
    assert list(retested.rules) == ["refund_promise"]
    assert (
        retested.rules["refund_promise"].n_second + retested.rules["refund_promise"].dropped == 400
    )
    assert retested.rules["refund_promise"].methods["lora"].second == 0.5
    assert retested.data == "the generator's draw with another seed"
    assert "medical: the rows are not the offline generator's" in retested.left_out[0]
