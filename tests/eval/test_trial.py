from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import read_examples, write_examples
from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.rule import MANIFEST_KEY
from tests.eval.conftest import WITH_HEAD, World
from tests.signed import sign


def test_a_method_without_seeds_has_seed_0_alone_and_needs_no_adapter_config(world: World) -> None:
    world.recipe = WITH_HEAD
    world.add_rule(seeds=(1, 2))
    trial = world.trial()
    assert trial.seeds == (1, 2)
    assert [it.name for it in trial.contestants][-1] == "medical/head/0"
    assert list(trial.by_seed("head")) == [0]
    assert not (trial.by_seed("head")[0].folder / "adapter_config.json").exists()
    world.add_adapter("medical", "head", 0, {}, data_hash="0" * 64)
    with pytest.raises(GuardError, match="data_hash"):
        world.trial()


def test_every_seed_with_all_methods_is_found_and_a_stale_one_left_out(world: World) -> None:
    world.add_rule(seeds=(0, 2, 10, 11))
    (world.runs.adapter("toy", "medical", "lora", 2) / "card.json").unlink()
    world.add_adapter("medical", "lora", 11, {}, data_hash="0" * 64)
    trial = world.trial()
    assert trial.seeds == (0, 10)
    (why,) = trial.left_out
    assert why.startswith("medical seed 11:") and "data_hash" in why
    assert "make train RULE=medical MODEL=toy SEEDS=11" in why
    names = [f"medical/{method}/{seed}" for method in ("lora", "alora") for seed in (0, 10)]
    assert [contestant.name for contestant in trial.contestants] == names
    for asked in (1, 11):  # those that are asked for must exist and fit
        with pytest.raises(GuardError, match=rf"lora-seed{asked}.*make train.* SEEDS={asked}`"):
            world.trial(seeds=(0, asked))


def test_what_is_not_trained_is_named_with_its_commands(world: World) -> None:
    world.recipe = WITH_HEAD
    world.add_rule(seeds=(0, 2))
    cards = {}
    for method in ("lora", "alora", "head"):
        cards[method] = world.runs.adapter("toy", "medical", method) / "card.json"
    cards["lora"].unlink()
    (world.runs.adapter("toy", "medical", "alora", 2) / "card.json").unlink()
    with pytest.raises(GuardError, match=r"no seed .*lora: \[2\]; alora: \[0\]"):
        world.trial()
    cards["alora"].unlink()
    cards["head"].unlink()
    with pytest.raises(GuardError, match=r"alora, head missing.*METHOD=alora` and .*METHOD=head`"):
        world.trial()


def signed_anew(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    sign(folder)


def test_inputs_change_with_data_adapters_predictions_rule_and_recipe(world: World) -> None:
    world.add_rule()
    seen = {world.trial().inputs}
    assert world.trial().inputs in seen
    rows = read_examples(world.runs.data("medical") / "test.jsonl")
    logits = {example.id: 1.5 for example in rows}
    rule = world.rules / "medical.yaml"
    folder = world.runs.adapter("toy", "medical", "lora")
    changes: list[Callable[[], object]] = [
        lambda: world.write_test("medical", rows[1:]),
        lambda: world.add_adapter("medical", "lora", 0, logits),
        lambda: world.add_adapter("medical", "lora", 0, logits, threshold=0.7),
        lambda: rule.write_text(rule.read_text().replace("general information", "anything")),
        lambda: signed_anew(folder),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        seen.add(world.trial().inputs)
        assert len(seen) == 1 + number
    world.recipe = world.recipe.model_copy(update={"engine": {"block_size": 64}})
    assert world.trial().inputs not in seen


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"rule_hash": "0" * 64}, "rule_hash"),
        ({"prompt_hash": "0" * 64}, "prompt_hash"),
        ({"base_revision": "0" * 40}, "base_revision.*1111.*0000"),
        ({"base": "somebody/toy"}, "base is not the one.*nobody/toy.*somebody/toy"),
        ({"data_hash": "0" * 64}, "data_hash"),
        ({"method": "alora"}, "method"),
        ({"seed": 3}, "seed"),
        ({"reads": "last assistant"}, "reads is not the one.*conversation.*last assistant"),
        ({"max_fpr": 0.02}, "max_fpr is not the one.*None.*0.02"),
        ({"max_fpr_twins": 0.1}, "max_fpr_twins is not the one.*None.*0.1"),
        (
            {"recipe": {"dtype": "float16", "quantization": None, "lora": {}, "trainer": {}}},
            r"recipe is not.*dtype: float32.*dtype: float16",
        ),
        ({"files": {"adapter_model.safetensors": "0" * 64}}, "not those of the card"),
    ],
)
def test_another_adapter_is_refused(card: dict[str, Any], message: str, world: World) -> None:
    world.add_rule()
    world.add_adapter("medical", "lora", 0, {}, **card)
    with pytest.raises(GuardError, match=message):
        world.trial()


def test_missing_inputs_are_named_with_the_command_that_makes_them(world: World) -> None:
    with pytest.raises(GuardError, match=r"medical\.yaml"):
        world.trial()
    world.add_rule()
    folder = world.runs.adapter("toy", "medical", "alora")
    config = (folder / "adapter_config.json").rename(folder / "away")
    with pytest.raises(GuardError, match=r"no adapter_config\.json.*make train"):
        world.trial()
    config.rename(folder / "adapter_config.json")
    command = "make train RULE=medical MODEL=toy METHOD=alora"
    for file, told in (
        (folder / "predictions.jsonl", r"predictions\.jsonl.*MODEL=toy METHOD=alora FORCE=1`"),
        (folder / PEFT_WEIGHTS, "make train"),
        (folder / "card.json", f"recipe: alora missing.*{command}"),
        (world.runs.data("medical") / "train.jsonl", "no train.jsonl.*make data RULE=medical"),
    ):
        file.unlink()
        with pytest.raises(GuardError, match=told):
            world.trial()


def test_bad_test_data_are_refused(world: World) -> None:
    world.add_rule()
    path = world.runs.data("medical") / "test.jsonl"
    manifest = path.with_name("manifest.json")
    manifest.write_text(json.dumps({MANIFEST_KEY: {"turns": "last"}}))
    with pytest.raises(GuardError, match=r'turns: "last"; the rule says turns: "any"'):
        world.trial()  # labelled for what the rule was before
    manifest.unlink()
    row = read_examples(path)[0]
    for rows, problem in (([row, row], "same id"), ([], "no test examples")):
        write_examples(path, rows)
        with pytest.raises(GuardError, match=problem):
            world.trial()
