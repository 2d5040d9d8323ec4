"""Random adapters are served like trained ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.bench.workload.random_adapter import (
    adapter_mib,
    by_name,
    random_adapters,
    save_random_adapters,
)
from serve.engine import GuardEngine
from tests.serve import encoder_rules
from tests.serve.cards import prompts, recipe
from tests.serve.guarded import CONVERSATION, guard_engine, peft_logit

pytestmark = pytest.mark.slow


def test_random_adapters_have_the_recipe_s_rank_and_are_served_like_trained_ones(
    tmp_path: Path,
) -> None:
    engine = guard_engine()
    for method in recipe().adapter_methods:
        save_random_adapters([tmp_path / method], recipe(), method, prompts())
        config = json.loads((tmp_path / method / "adapter_config.json").read_text())
        assert config["r"] == recipe().methods[method].lora["r"]
        engine.add(f"random {method}", tmp_path / method)
        rule_text = engine.rules[f"random {method}"].rule_text
        verdict = engine.check(CONVERSATION, [f"random {method}"]).verdicts[0]
        engine.remove(f"random {method}")
        expected = peft_logit(CONVERSATION, rule_text, tmp_path / method)
        assert verdict.logit == pytest.approx(expected, abs=5e-4)
        assert verdict.logit != pytest.approx(peft_logit(CONVERSATION, rule_text, None), abs=2e-3)


def test_an_encoder_s_adapter_and_head_are_served_like_trained_ones() -> None:
    with (
        random_adapters(encoder_rules.recipe(), ["lora", "head"], 1) as folders,
        GuardEngine(encoder_rules.recipe(), by_name(folders), enforce_eager=True) as engine,
    ):
        check = engine.check(CONVERSATION)
        for verdict, folder in zip(check.verdicts, by_name(folders).values(), strict=True):
            expected = encoder_rules.reference_logit(CONVERSATION, folder)
            assert verdict.logit == pytest.approx(expected, abs=1e-5)


def test_they_have_nothing_in_common_and_their_folder_is_temporary() -> None:
    with random_adapters(recipe(), ["alora"], 2) as folders:
        first, second = folders["alora"].values()
        weights = [
            (folder / "adapter_model.safetensors").read_bytes() for folder in (first, second)
        ]
        assert weights[0] != weights[1]
        assert list(by_name(folders)) == ["alora-0", "alora-1"]
        assert adapter_mib(first) == pytest.approx(len(weights[0]) / 2**20)
    assert not first.exists()


def test_a_method_that_the_recipe_does_not_list_is_named() -> None:
    lora_alone = recipe().model_copy(update={"methods": {"lora": recipe().methods["lora"]}})
    with (
        pytest.raises(GuardError, match=r"lists no such method \(got alora\)"),
        random_adapters(lora_alone, ["alora"], 1),
    ):
        pass
