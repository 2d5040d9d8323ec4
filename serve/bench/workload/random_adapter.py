"""Adapters with random weights, for timing without training.

They are made only when asked for. Knows nothing of rules worth checking.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file as save_tensors

from guard.errors import GuardError
from guard.method import METHODS, PEFT_WEIGHTS, WORDS
from guard.prompt.builders import prompt_builder
from guard.prompt.decoder import PromptBuilder
from guard.prompt.ngrams import NgramVocabulary, ngram_rows
from guard.recipe import Kind, Recipe
from guard.rule import text_hash
from guard.weights.card import Card, file_digests
from guard.weights.head import Head, WordWeights, answer_hash
from serve.bench.workload.prompts import random_rule_text

SCALE = 0.05  # standard deviation of the weights
NGRAMS = 30_000  # how many a random rule knows
TOKEN_IDS = 16_000  # from how many they are made
# PEFT's task type and transformers' class, by kind of base
TASKS: dict[Kind, tuple[str, str]] = {
    "decoder": ("CAUSAL_LM", "AutoModelForCausalLM"),
    "encoder": ("TOKEN_CLS", "AutoModelForTokenClassification"),
}


@contextlib.contextmanager
def random_adapters(
    recipe: Recipe, methods: Sequence[str], count: int, scale: float = SCALE
) -> Iterator[dict[str, dict[str, Path]]]:
    """`count` adapters or heads of each method in a temporary folder: method -> name -> folder.

    `scale` is the standard deviation of the adapters' weights.
    """
    prompts = prompt_builder(recipe)
    with tempfile.TemporaryDirectory() as scratch:
        folders: dict[str, dict[str, Path]] = {}
        for method in methods:
            names = [f"{method}-{number}" for number in range(count)]
            folders[method] = {name: Path(scratch) / name for name in names}
            if METHODS[method].is_adapter:
                save_random_adapters(folders[method].values(), recipe, method, prompts, scale)
            else:
                save_random_heads(folders[method].values(), recipe, method, prompts)
        yield folders


def by_name(folders: Mapping[str, Mapping[str, Path]]) -> dict[str, Path]:
    """The folders of all methods, by the adapters' names."""
    adapters: dict[str, Path] = {}
    for method_folders in folders.values():
        adapters |= method_folders
    return adapters


def adapter_mib(folder: Path) -> float:
    """The size of an adapter's low-rank weights on disk, in MiB, without an encoder's words."""
    return (folder / PEFT_WEIGHTS).stat().st_size / 2**20


def save_random_adapters(
    folders: Iterable[Path],
    recipe: Recipe,
    method: str,
    prompts: PromptBuilder,
    scale: float = SCALE,
) -> None:
    """Write adapter folders as training would, with the recipe's rank and targets. The weights are
    noise that no two adapters share. An encoder's adapter has a head and words of its own.
    """
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file

    _refuse_other_kinds(recipe)
    task, model_class = TASKS[recipe.kind]
    config = LoraConfig(task_type=task, **recipe.settings(method).lora)
    config.alora_invocation_tokens = None
    if METHODS[method].acts_from == "suffix":
        config.alora_invocation_tokens = list(prompts.invocation(random_rule_text(recipe)))
    base_config = transformers.AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    with torch.device("meta"):  # shapes only: a base of any size takes no memory
        base = getattr(transformers, model_class).from_config(base_config)
        model = get_peft_model(base, config)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    config.inference_mode = True
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        noise = torch.Generator().manual_seed(seed)
        weights = [scale * torch.randn(shape, generator=noise) for shape in shapes.values()]
        save_file(dict(zip(shapes, weights, strict=True)), folder / PEFT_WEIGHTS)
        config.save_pretrained(str(folder))
        if recipe.kind == "encoder":
            save_tensors(_random_words(np.random.default_rng(seed)).tensors(), folder / WORDS)
        _card(folder, recipe, method, prompts).save(folder)


def _refuse_other_kinds(recipe: Recipe) -> None:
    if recipe.kind not in TASKS:
        problem = "there are no random adapters on this kind of base"
        raise GuardError(problem, got=recipe.kind, remedy="Train a rule on it")


def save_random_heads(
    folders: Iterable[Path], recipe: Recipe, method: str, prompts: PromptBuilder
) -> None:
    """Write folders of heads as training would, with noise for weights."""
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit).hidden_size
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        noise = np.random.default_rng(seed)
        weight = SCALE * noise.standard_normal(size, dtype=np.float32)
        head = Head(weight, 0.0, _random_words(noise))
        save_tensors(head.tensors(), folder / METHODS[method].weights)
        _card(folder, recipe, method, prompts).save(folder)


def _random_words(noise: np.random.Generator) -> WordWeights:
    """Random words, as many as a rule knows that was trained on 2,400 rows."""
    text = noise.integers(TOKEN_IDS, size=NGRAMS // 2)  # as many tokens as pairs
    ngrams = np.unique(ngram_rows([text.tolist()]).keys)
    vocabulary = NgramVocabulary(ngrams, np.ones(len(ngrams), np.float32))
    return WordWeights(vocabulary, SCALE * noise.standard_normal(len(ngrams), dtype=np.float32))


def _card(folder: Path, recipe: Recipe, method: str, prompts: PromptBuilder) -> Card:
    text = random_rule_text(recipe)
    return Card(
        rule=folder.parent.name,  # as in runs/MODEL/RULE/METHOD
        rule_text=text,
        rule_hash=text_hash(text),
        prompt_hash=prompts.hash,
        answer_hash=answer_hash(),
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
        coverage=None,
        max_fpr=None,
        files=file_digests(folder, method),
    )
