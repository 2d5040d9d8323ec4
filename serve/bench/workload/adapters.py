"""The adapters that benchmarks measure with. They have random weights: times are the same, and
nothing has to be trained. Knows nothing of engines or of what is measured.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from guard.errors import GuardError
from guard.method import HEAD, METHODS, PEFT_WEIGHTS
from guard.prompt.decoder import PromptBuilder
from guard.prompt.ngrams import SECOND_BITS, NgramVocabulary
from guard.recipe import Recipe
from guard.weights.card import Card, file_digests
from guard.weights.head import Head, WordWeights
from guard.weights.version_zero import card_of_base
from serve.bench.workload.prompts import random_rule_text

SCALE = 0.05  # standard deviation of random weights
NGRAMS = 7_000  # of a random head: a head of 1,000 short conversations has about as many


def copies(
    folders: Mapping[str, Sequence[Path]], count: int
) -> tuple[dict[str, list[str]], dict[str, Path]]:
    """`count` names for each method, and the folder of each; adapters are reused as needed."""
    names: dict[str, list[str]] = {}
    adapters: dict[str, Path] = {}
    for method, method_folders in folders.items():
        names[method] = [f"{method}-{number}" for number in range(count)]
        for number, name in enumerate(names[method]):
            adapters[name] = method_folders[number % len(method_folders)]
    return names, adapters


@contextlib.contextmanager
def random_adapters(
    recipe: Recipe, methods: Sequence[str], count: int
) -> Iterator[dict[str, Path]]:
    """`count` adapters of each method in a temporary folder, by name: `lora-0`, `lora-1`, …."""
    with tempfile.TemporaryDirectory() as scratch:
        adapters: dict[str, Path] = {}
        for method in methods:
            folders = [Path(scratch) / f"{method}-{number}" for number in range(count)]
            save_random_adapters(folders, recipe, method)
            adapters |= {folder.name: folder for folder in folders}
        yield adapters


def save_random_adapters(folders: Iterable[Path], recipe: Recipe, method: str) -> None:
    """Write adapter folders as training would, with the recipe's rank and targets, and heads where
    it has them. The weights are noise that no two adapters share. Raises GuardError for an encoder,
    whose adapters also have heads.
    """
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if recipe.is_encoder:
        problem = "there are no random adapters on this kind of base"
        raise GuardError(problem, got=recipe.kind, remedy="Name a decoder, as MODEL=tiny")
    prompts = PromptBuilder.of(recipe)
    config = LoraConfig(task_type="CAUSAL_LM", **recipe.settings(method).lora)
    config.alora_invocation_tokens = None
    if METHODS[method].acts_from == "suffix":
        config.alora_invocation_tokens = list(prompts.invocation(random_rule_text(recipe)))
    base_config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    with torch.device("meta"):  # shapes only: a base of any size takes no memory
        model = get_peft_model(AutoModelForCausalLM.from_config(base_config), config)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    config.inference_mode = True
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        noise = torch.Generator().manual_seed(seed)
        weights = [SCALE * torch.randn(shape, generator=noise) for shape in shapes.values()]
        save_file(dict(zip(shapes, weights, strict=True)), folder / PEFT_WEIGHTS)
        config.save_pretrained(str(folder))
        if recipe.settings(method).head is not None:
            _save_random_head(folder, base_config, seed)
        _card(folder, recipe, method, prompts).save(folder)


def _save_random_head(folder: Path, base_config: Any, seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    first, second = rng.integers(base_config.vocab_size, size=(2, NGRAMS), dtype=np.uint64)
    second[: NGRAMS // 4] = 0  # no second token
    keys = np.unique(first | (second << SECOND_BITS))
    vocabulary = NgramVocabulary(keys, np.ones(len(keys), np.float32))
    weights = rng.standard_normal(len(keys), np.float32)
    weight = SCALE * rng.standard_normal(base_config.hidden_size, np.float32)
    head = Head(weight, 0.0, WordWeights(vocabulary, weights))
    save_file(head.tensors(), folder / HEAD)


def _card(folder: Path, recipe: Recipe, method: str, prompts: PromptBuilder) -> Card:
    rule, text = folder.parent.name, random_rule_text(recipe)  # as in runs/MODEL/RULE/METHOD
    weights = {"untrained": None, "files": file_digests(folder, method)}
    card = card_of_base(recipe, prompts, method, rule, text)
    return card.model_copy(update={**weights, "uncertainty_band": (0.5, 0.5)})
