"""The adapters that a benchmark measures with: trained ones, or random ones served like them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.bench.workload.adapters import (
    adapter_mib,
    copies,
    random_adapters,
    save_random_adapters,
)
from tests.serve import encoder_rules
from tests.serve.cards import recipe
from tests.serve.guarded import CONVERSATION, guard_engine, peft_logit
from tests.serve.heads import reference_logit


def test_adapters_are_loaded_again_under_other_names() -> None:
    folders: dict[str, Sequence[Path]] = {"lora": [Path("a")], "alora": [Path("b"), Path("c")]}
    names, adapters = copies(folders, 3)
    assert names["alora"] == ["alora-0", "alora-1", "alora-2"]
    assert [str(adapters[name]) for name in names["alora"]] == ["b", "c", "b"]
    assert [str(adapters[name]) for name in names["lora"]] == ["a", "a", "a"]


@pytest.mark.slow
def test_random_adapters_have_the_recipe_s_rank_and_are_served_like_trained_ones(
    tmp_path: Path,
) -> None:
    engine = guard_engine()
    for method in recipe().adapter_methods:
        save_random_adapters([tmp_path / method], recipe(), method)
        config = json.loads((tmp_path / method / "adapter_config.json").read_text())
        assert config["r"] == recipe().methods[method].lora["r"]
        engine.add(f"random {method}", tmp_path / method)
        rule_text = engine.rules[f"random {method}"].rule_text
        verdict = engine.check(CONVERSATION, [f"random {method}"]).verdicts[0]
        engine.remove(f"random {method}")
        expected = peft_logit(CONVERSATION, rule_text, tmp_path / method)
        assert verdict.logit == pytest.approx(expected, abs=5e-4)
        assert verdict.logit != pytest.approx(peft_logit(CONVERSATION, rule_text, None), abs=2e-3)


@pytest.mark.slow
def test_an_alora_that_answers_by_a_head_has_a_random_one(tmp_path: Path) -> None:
    alora = recipe().methods["alora"].model_copy(update={"head": {}})
    by_head = recipe().model_copy(update={"methods": recipe().methods | {"alora": alora}})
    save_random_adapters([tmp_path / "alora"], by_head, "alora")
    engine = guard_engine()
    engine.add("random", tmp_path / "alora")
    rule_text = engine.rules["random"].rule_text
    verdict = engine.check(CONVERSATION, ["random"]).verdicts[0]
    engine.remove("random")
    expected = reference_logit(CONVERSATION, rule_text, tmp_path / "alora")
    assert verdict.logit == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_they_have_nothing_in_common_and_their_folder_is_temporary() -> None:
    with random_adapters(recipe(), ["alora"], 2) as folders:
        first, second = folders.values()
        weights = [
            (folder / "adapter_model.safetensors").read_bytes() for folder in (first, second)
        ]
        assert weights[0] != weights[1]
        assert list(folders) == ["alora-0", "alora-1"]
        assert adapter_mib(first) == pytest.approx(len(weights[0]) / 2**20)
    assert not first.exists()


def test_there_are_none_of_a_method_that_the_recipe_does_not_list_and_on_an_encoder() -> None:
    lora_alone = recipe().model_copy(update={"methods": {"lora": recipe().methods["lora"]}})
    with (
        pytest.raises(GuardError, match=r"lists no such method \(got alora\)"),
        random_adapters(lora_alone, ["alora"], 1),
    ):
        pass
    with (
        pytest.raises(GuardError, match=r"no random adapters.*Name a decoder"),
        random_adapters(encoder_rules.recipe(), ["lora"], 1),
    ):
        pass
