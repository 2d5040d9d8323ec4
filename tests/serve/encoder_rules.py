"""Random rules on MiniLM with cards, as training would have left them, and what plain PEFT says of
them. Tests only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForTokenClassification

from guard.conversation.example import Message
from guard.method import METHODS, WORDS
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import Window, judged_of
from guard.recipe import Recipe, load_recipe
from guard.rule import Judged, Reads, text_hash
from guard.weights.card import read_card
from guard.weights.head import Head, WordWeights
from tests.plain_words import file_of_words, plain_word_logit, random_words
from tests.serve.cards import save_card

TARGETS = ("query", "key", "value", "dense")
ENGINE = {"enforce_eager": True, "max_loras": 4}


@functools.cache
def recipe() -> Recipe:
    return load_recipe("minilm")


_builders: dict[str, EncoderPromptBuilder] = {}


def builder(of: Recipe | None = None) -> EncoderPromptBuilder:
    base = of or recipe()
    if base.base not in _builders:
        _builders[base.base] = EncoderPromptBuilder.of(base)
    return _builders[base.base]


def classifier_on(base_path: str) -> Any:
    """The base with a random classifier of two labels."""
    return AutoModelForTokenClassification.from_pretrained(base_path, num_labels=2).eval()


def save_encoder_rule(
    folder: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = TARGETS,
    reads: Reads = "conversation",
    texts: Sequence[Sequence[Message]] = (),
    of: Recipe | None = None,
) -> Path:
    """A random adapter with a random head, and random words of half of what stands in `texts`."""
    torch.manual_seed(seed)
    base = classifier_on((of or recipe()).base_path)
    config = LoraConfig(
        task_type="TOKEN_CLS",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(targets),
        init_lora_weights=False,
    )
    get_peft_model(base, config).save_pretrained(str(folder), save_embedding_layers=False)
    if texts:
        save_file(words_of(texts, seed, of).tensors(), folder / WORDS)
    save_encoder_card(folder, "lora", of, reads=reads)
    return folder


def words_of(texts: Sequence[Sequence[Message]], seed: int, of: Recipe | None) -> WordWeights:
    """Random weights of half of the words in `texts`."""
    keys = np.unique(ngram_rows([builder(of).prefix_ids(text) for text in texts]).keys)[::2]
    return random_words(np.random.default_rng(seed), keys)


def save_encoder_head(folder: Path, *, seed: int, reads: Judged = "conversation") -> Path:
    """A random head on the frozen encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    weight = np.random.default_rng(seed).standard_normal(384).astype(np.float32)
    save_file(Head(weight, 0.1).tensors(), folder / METHODS["head"].weights)
    save_encoder_card(folder, "head", reads=reads)
    return folder


def save_encoder_card(
    folder: Path, method: str, of: Recipe | None = None, **replaced: object
) -> None:
    base = of or recipe()
    fields: dict[str, object] = {"rule_text": "", "rule_hash": text_hash("")}
    fields |= {"prompt_hash": builder(of).hash, "model": base.name, "base": base.base}
    fields |= {"base_revision": base.base_revision, "temperature": 1.0}
    fields |= {"uncertainty_band": (0.5, 0.5), "threshold": 0.5}
    save_card(folder, folder.name, method, **(fields | replaced))


@functools.lru_cache(maxsize=16)
def reference_model(folder: Path, base_path: str) -> Any:
    """What plain PEFT makes of a folder; of a head's, the base without a classifier."""
    model = classifier_on(base_path)
    if not (folder / METHODS["head"].weights).is_file():
        return PeftModel.from_pretrained(model, str(folder)).eval()
    model.classifier = torch.nn.Identity()
    return model


def reference_logit(messages: Sequence[Message], folder: Path, of: Recipe | None = None) -> float:
    """The highest logit of what the rule judges, window by window, each alone, in plain
    transformers; where it knows words, those of whom it judges count.
    """
    logits: list[float] = []
    reads, file = read_card(folder).reads, file_of_words(folder)
    for window in builder(of).windows(builder(of).prefix_ids(messages), reads):
        of_tokens = _token_logits(window, folder, (of or recipe()).base_path)
        for start, end, speaker, _ in builder(of).spans(window):
            logit = float(of_tokens[start:end].mean())
            if file and judged_of([speaker], reads):
                logit += plain_word_logit(load_file(file), window.token_ids[start:end])
            logits.append(logit)
    return max(logits)


def _token_logits(window: Window, folder: Path, base_path: str) -> np.ndarray:
    with torch.no_grad():
        model = reference_model(folder, base_path)
        outputs: np.ndarray = model(input_ids=torch.tensor([window.token_ids])).logits[0].numpy()
    head = folder / METHODS["head"].weights
    if head.is_file():
        tensors = load_file(head)
        of_tokens: np.ndarray = outputs @ tensors["weight"] + tensors["bias"][0]
        return of_tokens
    return outputs[:, 1] - outputs[:, 0]  # type: ignore[no-any-return]
