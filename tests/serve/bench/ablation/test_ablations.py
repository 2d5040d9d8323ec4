"""The table of ablations: one thing off each, the full engine first."""

from __future__ import annotations

from serve.bench.ablation.ablations import ABLATIONS, FAN_OUT, FLEET, FULL_ENGINE, Ablation
from tests.serve.cards import recipe


def test_every_traffic_begins_with_the_full_engine_and_names_each_once() -> None:
    for ablations in ABLATIONS.values():
        names = [ablation.name for ablation in ablations]
        assert ablations[0] == Ablation(FULL_ENGINE) and len(set(names)) == len(names)
        assert all(ablation != Ablation(ablation.name) for ablation in ablations[1:])


def test_traffic_is_described_in_words_and_has_engine_arguments() -> None:
    assert str(FAN_OUT) == "a conversation of 1,000 tokens with 100 rules, 100 slots"
    assert str(FLEET).endswith("Zipf's alpha 1.0, 32 slots, 64 in host memory")
    assert FAN_OUT.engine == {"max_loras": 100}
    assert FLEET.engine == {"max_loras": 32, "max_cpu_loras": 64}


def test_an_ablation_changes_the_recipe_of_its_adapters_only() -> None:
    assert Ablation("full").recipe(recipe()) == recipe()
    assert Ablation("title", rule_turn="title").recipe(recipe()).rule_turn == "title"
    changed = Ablation("wide", all_linear=True).recipe(recipe()).methods
    assert changed["alora"].lora["target_modules"] == "all-linear"
    assert changed["lora"] == recipe().methods["lora"]
