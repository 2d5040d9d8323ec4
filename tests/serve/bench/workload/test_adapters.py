"""The adapters that a benchmark measures with: trained ones, or random ones served like them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from serve.bench.workload.adapters import (
    adapter_folders,
    adapter_mib,
    copies,
    random_adapters,
    save_random_adapters,
)
from tests.serve import encoder_rules
from tests.serve.cards import recipe
from tests.serve.guarded import CONVERSATION, guard_engine, peft_logit, save_adapter


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A folder with one trained rule."""
    runs = Runs(tmp_path)
    for method in recipe().adapter_methods:
        save_adapter(
            runs.adapter("tiny", "medical_advice", method), "medical_advice", seed=1, method=method
        )
    return runs


def test_without_trained_adapters_nothing_is_measured_and_the_flag_for_random_ones_is_named(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(GuardError, match=r"make train.*--random"),
        adapter_folders(recipe(), Runs(tmp_path), is_random=False),
    ):
        pytest.fail("no adapters, but the benchmark went on")


def test_the_trained_ones_are_taken_or_random_ones(runs: Runs) -> None:
    trained = {
        method: [runs.adapter("tiny", "medical_advice", method)]
        for method in recipe().adapter_methods
    }
    for rule in (None, "medical_advice"):
        with adapter_folders(recipe(), runs, is_random=False, rule=rule) as folders:
            assert folders == trained


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
        pytest.raises(GuardError, match=r"no random adapters.*Train a rule"),
        random_adapters(encoder_rules.recipe(), ["lora"], 1),
    ):
        pass
