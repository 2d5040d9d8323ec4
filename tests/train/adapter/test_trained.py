"""A trained adapter is written as PEFT's two files, which name no path of this machine, while it
stands on its base.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.train.conftest import MakeJob, data, with_lora
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter
from train.prefix.trainer import fit


def test_what_is_saved_answers_in_plain_peft_as_it_did(
    make_job: MakeJob, toy_base: Path, tmp_path: Path
) -> None:
    job = with_lora(make_job("alora"), init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(toy_base), lora_config(job))
    assert isinstance(model, PeftModel)
    trained = TrainedAdapter(model, job)
    trained.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == job.recipe.base
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(toy_base), tmp_path / "saved"
    )
    prompts = [row.prompt for row in data(job).validation]
    assert trained.logits(prompts) == pytest.approx(TrainedAdapter(loaded, job).logits(prompts))


def test_an_adapter_that_the_next_has_taken_the_place_of_neither_answers_nor_is_written(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("alora", max_steps=1)
    rows = data(job)
    (trained,) = fit([(job, rows)])
    assert isinstance(trained, TrainedAdapter) and len(trained.validation_logits) > 0
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.logits([rows.validation[0].prompt])
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
