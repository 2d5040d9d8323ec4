"""Random rules on MiniLM with cards, as training would have left them, and what plain PEFT says of
them. Tests only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoModelForTokenClassification

from guard.conversation.example import Message
from guard.method import METHODS, WORDS
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import Window, judged_of
from guard.recipe import Recipe, load_recipe
from guard.rule import Judged, text_hash
from guard.weights.card import read_card
from guard.weights.head import Head
from tests.plain_words import file_of_words, plain_word_logit, random_words
from tests.serve.cards import save_card

TARGETS = ("query", "key", "value", "dense")
ENGINE = {"enforce_eager": True, "max_loras": 4}


@functools.cache
def recipe() -> Recipe:
    return load_recipe("minilm")


@functools.cache
def builder() -> EncoderPromptBuilder:
    return EncoderPromptBuilder.of(recipe())


def save_encoder_rule(
    folder: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = TARGETS,
    reads: Judged = "conversation",
    texts: Sequence[Sequence[Message]] = (),
) -> Path:
    """A random adapter with a random head, and random words of half of what stands in `texts`."""
    torch.manual_seed(seed)
    base = AutoModelForTokenClassification.from_pretrained(recipe().base_path, num_labels=2)
    config = LoraConfig(
        task_type="TOKEN_CLS",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(targets),
        init_lora_weights=False,
    )
    get_peft_model(base, config).save_pretrained(str(folder), save_embedding_layers=False)
    if texts:
        keys = np.unique(ngram_rows([builder().prefix_ids(text) for text in texts]).keys)[::2]
        words = random_words(np.random.default_rng(seed), keys)
        save_file(words.tensors(), folder / WORDS)
    save_encoder_card(folder, "lora", reads=reads)
    return folder


def save_encoder_head(
    folder: Path,
    *,
    seed: int,
    reads: Judged = "conversation",
    weight: np.ndarray | None = None,
    bias: float = 0.1,
) -> Path:
    """A head on the frozen encoder; random without a `weight`."""
    folder.mkdir(parents=True, exist_ok=True)
    if weight is None:
        weight = np.random.default_rng(seed).standard_normal(384)
    head = Head(weight.astype(np.float32), bias)
    save_file(head.tensors(), folder / METHODS["head"].weights)
    save_encoder_card(folder, "head", reads=reads)
    return folder


def save_encoder_card(folder: Path, method: str, **replaced: object) -> None:
    fields: dict[str, object] = {
        "rule_text": "",
        "rule_hash": text_hash(""),
        "prompt_hash": builder().hash,
        "model": "minilm",
        "base": recipe().base,
        "base_revision": recipe().base_revision,
        "temperature": 1.0,
        "uncertainty_band": (0.5, 0.5),
        "threshold": 0.5,
    }
    save_card(folder, folder.name, method, **(fields | replaced))


@functools.cache
def peft_model(folder: Path) -> PeftModel:
    base = AutoModelForTokenClassification.from_pretrained(recipe().base_path, num_labels=2)
    return PeftModel.from_pretrained(base, str(folder)).eval()


@functools.cache
def frozen_encoder() -> torch.nn.Module:
    model: torch.nn.Module = AutoModel.from_pretrained(recipe().base_path).eval()
    return model


def reference_logit(messages: Sequence[Message], folder: Path) -> float:
    """The highest logit of what the rule judges, window by window, each alone, in plain
    transformers; where it knows words, those of whom it judges count.
    """
    logits: list[float] = []
    reads, file = read_card(folder).reads, file_of_words(folder)
    for window in builder().windows(builder().prefix_ids(messages), reads):
        of_tokens = _token_logits(window, folder)
        for start, end, speaker, _ in builder().spans(window):
            logit = float(of_tokens[start:end].mean())
            if file and judged_of([speaker], reads):
                logit += plain_word_logit(load_file(file), window.token_ids[start:end])
            logits.append(logit)
    return max(logits)


def _token_logits(window: Window, folder: Path) -> np.ndarray:
    ids = torch.tensor([window.token_ids])
    with torch.no_grad():
        if (folder / METHODS["head"].weights).is_file():
            tensors = load_file(folder / METHODS["head"].weights)
            states = frozen_encoder()(input_ids=ids).last_hidden_state[0].numpy()
            of_tokens: np.ndarray = states @ tensors["weight"] + tensors["bias"][0]
            return of_tokens
        logits = peft_model(folder)(input_ids=ids).logits[0].numpy()
    difference: np.ndarray = logits[:, 1] - logits[:, 0]
    return difference
