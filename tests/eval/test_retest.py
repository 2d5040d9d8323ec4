from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.build import build
from data.generator.generate import Counts
from eval.metrics import ece_expected
from eval.retest import Retest, retest
from guard.errors import GuardError
from guard.example import GENERATOR, Message, Split, read_examples, write_examples
from guard.layout import Runs
from guard.rule import RULES, load_rule
from guard.verdict import Calibration, expected_calibration_error
from serve.engine import ScoreRequest
from tests.eval.conftest import ToyEngine, World, evidence


def second_set(world: World, rule: str, *, words: str = "") -> Path:
    """The rule's test rows in other words, `words` among them, in another folder."""
    folder = world.runs.root / "second"
    rows = []
    for number, row in enumerate(read_examples(world.runs.data(rule) / "test.jsonl")):
        # the toy's rows differ in a number alone: what is not to count as near has to say more
        words_of_row = " ".join(
            f"word{chr(97 + number_of_word)}{chr(97 + number % 26)}{number // 26 * 'x'}"
            for number_of_word in range(20)
        )
        rows.append(
            replace(
                row,
                id=f"again-{row.id}",
                messages=(Message("user", f"{words} {words_of_row}"), *row.messages[1:]),
            )
        )
    (folder / rule).mkdir(parents=True)
    write_examples(folder / rule / "test.jsonl", rows)
    return folder


def again(world: World, folder: Path, engine: ToyEngine | None = None) -> Retest:
    engine = engine or ToyEngine(lambda request: evidence(request.messages))
    return retest(
        ",".join(path.stem for path in sorted(world.rules.glob("*.yaml"))),
        world.recipe,
        folder,
        runs=world.runs,
        rules=world.rules,
        open_predictor=engine.open,
    )


def test_the_same_knowledge_shows_no_change(world: World) -> None:
    world.add_rule("medical", examples=40, seeds=(0, 1))
    retested = again(world, second_set(world, "medical"))
    for method in world.recipe.methods:
        rule = retested.rules["medical"].methods[method]
        assert (rule.first, rule.second, rule.change, rule.change_ci95) == (
            1.0,
            1.0,
            0.0,
            (0.0, 0.0),
        )
    assert retested.rules["medical"].seeds == (0, 1)
    rows = [
        row
        for root in (world.runs.root / "data", world.runs.root / "second")
        for row in read_examples(root / "medical" / "test.jsonl")
    ]
    p = [Calibration(2.0).p_violation(evidence(row.messages)) for row in rows]
    ece = expected_calibration_error([row.label for row in rows], p)
    assert retested.mean_ece == {method: pytest.approx(ece) for method in world.recipe.methods}
    floor = ece_expected(p)
    assert retested.mean_ece_expected == {
        method: pytest.approx(floor) for method in world.recipe.methods
    }
    assert f"lora {ece:.3f} (expected {floor:.3f}), alora {ece:.3f}" in retested.as_markdown()
    assert "no change within its interval: 1 of 1" in retested.as_markdown()


def test_an_adapter_that_learnt_the_first_set_by_heart_is_seen(world: World) -> None:
    world.add_rule("medical", examples=40)
    world.add_rule("legal", examples=40)

    def by_heart(request: ScoreRequest) -> float:
        is_known = "again" not in request.messages[0].content or "alora" not in str(request.adapter)
        return evidence(request.messages) if is_known else 1.0

    folder = second_set(world, "medical", words="again")
    second_set(world, "legal", words="again")
    retested = again(world, folder, ToyEngine(by_heart))
    alora, lora = (retested.rules["medical"].methods[method] for method in ("alora", "lora"))
    assert (alora.first, alora.second, alora.change) == (1.0, 0.5, -0.5)
    assert alora.change_ci95[1] < 0
    assert lora.change == 0.0
    assert retested.mean_change["alora"] == -0.5
    assert "no change within its interval: 0 of 2" in retested.as_markdown()


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_rows_that_come_close_to_a_row_of_the_first_set_are_dropped_and_counted(
    world: World, split: Split
) -> None:
    world.add_rule("medical", examples=40)
    data = world.runs.data("medical")
    folder = second_set(world, "medical")
    second = read_examples(folder / "medical" / "test.jsonl")
    first = read_examples(data / "test.jsonl") if split == "test" else []
    write_examples(
        data / f"{split}.jsonl",
        [*first, *(replace(row, id=f"first-{row.id}", split=split) for row in second[:6])],
    )
    for method in world.recipe.methods:
        world.add_adapter(
            "medical", method, 0, {row.id: 0.0 for row in read_examples(data / "test.jsonl")}
        )
    retested = again(world, folder)
    assert (retested.rules["medical"].dropped, retested.rules["medical"].n_second) == (6, 34)


def test_the_first_set_again_or_one_of_another_source_is_refused(world: World) -> None:
    world.add_rule("medical", examples=40)
    folder = world.runs.root / "second"
    shutil.copytree(world.runs.data("medical"), folder / "medical")
    with pytest.raises(
        GuardError, match="every row of the second test set comes close to a row of the first"
    ):
        again(world, folder)
    world.add_manifest("medical", "mine.jsonl")
    (folder / "medical" / "manifest.json").write_text(json.dumps({"source": "generator"}))
    with pytest.raises(GuardError, match=r"(?s)another source.*generator, the first mine\.jsonl"):
        again(world, folder)


def test_strata_are_told_apart(world: World) -> None:
    """By heart in what the first set calls unseen: the other stratum shows no change."""
    world.add_rule("medical", examples=40)
    folder = second_set(world, "medical", words="again")

    def by_heart(request: ScoreRequest) -> float:
        unseen = {row.messages for row in rows if row.meta["stratum"] == "unseen"}
        return 1.0 if tuple(request.messages) in unseen else evidence(request.messages)

    rows = read_examples(folder / "medical" / "test.jsonl")
    retested = again(world, folder, ToyEngine(by_heart)).rules["medical"]
    assert set(retested.strata) == {"seen", "unseen"}
    assert retested.strata["seen"]["alora"].change == 0.0
    assert retested.strata["unseen"]["alora"].change == -0.5
    assert retested.methods["alora"].change == -0.25


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
    assert "medical: the rows are not the offline generator's" in retested.left_out[0]
    with pytest.raises(GuardError, match=r"not the offline generator's.*--data FOLDER"):
        retest(
            "medical", world.recipe, runs=world.runs, rules=world.rules, open_predictor=engine.open
        )
    with pytest.raises(GuardError, match=r"(?s)no test.jsonl.*make all RULE=refund_promise"):
        retest(
            "refund_promise",
            world.recipe,
            runs=Runs(world.root / "none"),
            rules=world.rules,
            open_predictor=engine.open,
        )


def test_without_a_second_test_set_the_error_says_how_to_write_one(world: World) -> None:
    world.add_rule("medical", examples=40)
    with pytest.raises(GuardError, match=r"(?s)no second test set.*--rule medical --seed 1"):
        again(world, world.runs.root / "nowhere")
