"""Random adapters, as benchmarks measure with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.bench.workload.adapters import save_random_adapters
from tests.serve.cards import recipe
from tests.serve.guarded import CONVERSATION, guard_engine, peft_logit
from tests.serve.heads import reference_logit


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
