"""Adapters with random weights, for timing without training. Knows nothing of rules worth checking; never made unasked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from guard.card import Card, weights_sha256
from guard.method import PEFT_WEIGHTS
from guard.prompt import PromptBuilder
from guard.recipe import Recipe
from guard.rule import text_hash
from serve.bench.workload import told


def save_random_adapters(
    folders: Iterable[Path], recipe: Recipe, method: str, prompts: PromptBuilder
) -> None:
    """Write adapter folders as training would, with the recipe's rank and targets, and for weights noise that no two have in common."""
    config = LoraConfig(task_type="CAUSAL_LM", **recipe.methods[method].lora)
    config.alora_invocation_tokens = (
        list(prompts.invocation(told(recipe))) if method == "alora" else None
    )
    with torch.device("meta"):  # shapes only: a base of any size takes no memory
        base = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
        )
        model = get_peft_model(base, config)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    config.inference_mode = True
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(seed)
        save_file(
            {
                name: 0.05 * torch.randn(shape, generator=generator)
                for name, shape in shapes.items()
            },
            folder / PEFT_WEIGHTS,
        )
        config.save_pretrained(str(folder))
        _card(folder, recipe, method, prompts).save(folder)


def _card(folder: Path, recipe: Recipe, method: str, prompts: PromptBuilder) -> Card:
    text = told(recipe)
    return Card(
        rule="random",
        rule_text=text,
        rule_hash=text_hash(text),
        prompt_hash=prompts.hash,
        method=method,
        model=recipe.name,
        base=recipe.base,
        base_revision=recipe.base_revision,
        data_hash="none",
        test_sha256="none",
        seed=0,
        recipe={},
        versions={},
        metrics={},
        temperature=1.0,
        bias=0.0,
        threshold=0.5,
        uncertainty_band=(0.5, 0.5),
        max_fpr=None,
        weights_sha256=weights_sha256(folder),
    )
