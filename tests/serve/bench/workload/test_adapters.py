"""The adapters that a benchmark measures with: trained ones, or random ones served like them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.bench.workload.adapters import adapter_mib, copies, random_adapters, save_random_adapters
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
@pytest.mark.parametrize(
    ("method", "head"), [("lora", None), ("alora", None), ("alora", {})], ids=str
)
def test_random_adapters_have_the_recipe_s_rank_and_are_served_like_trained_ones(
    tmp_path: Path, method: str, head: dict[str, object] | None
) -> None:
    settings = recipe().methods[method].model_copy(update={"head": head})
    of_method = recipe().model_copy(update={"methods": recipe().methods | {method: settings}})
    folder, engine = tmp_path / method, guard_engine()
    save_random_adapters([folder], of_method, method)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == settings.lora["r"]
    engine.add("random", folder)
    rule_text = engine.rules["random"].rule_text
    (verdict,) = engine.check(CONVERSATION, ["random"]).verdicts
    engine.remove("random")
    expected = peft_logit(CONVERSATION, rule_text, folder)
    if head is not None:
        expected = reference_logit(CONVERSATION, rule_text, folder)
    assert verdict.logit == pytest.approx(expected, abs=2e-3)
    assert verdict.logit != pytest.approx(peft_logit(CONVERSATION, rule_text, None), abs=2e-3)


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
