"""Heads with random weights and cards, and what plain transformers says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from guard.conversation.example import Message
from guard.method import HEAD, PEFT_CONFIG
from guard.prompt.ngrams import ngram_rows
from guard.weights.card import load_card
from guard.weights.head import Head
from tests.plain_words import plain_word_logit, random_words
from tests.serve.adapters import base_model, peft_model
from tests.serve.cards import prompts, save_card
from tests.serve.guarded import save_adapter

HIDDEN_SIZE = int(base_model().config.hidden_size)
HEAD_FILE = HEAD


def save_head(folder: Path, name: str, *, seed: int, method: str = "head", **card: object) -> Path:
    """A random head with a card, as training would have left it; `card` are fields of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    save_file(random_head(rng).tensors(), folder / HEAD_FILE)
    save_card(folder, name, method, **card)
    return folder


def save_alora(folder: Path, name: str, *, seed: int, **card: object) -> Path:
    """A random aLoRA with a random head, by whose logit it answers."""
    save_adapter(folder, name, seed=seed)
    return save_head(folder, name, seed=seed, method="alora", **card)


def random_head(rng: np.random.Generator) -> Head:
    """With weights for a few states and half of the words that may come."""
    words = [
        f"{number} word whether rule My head hurts Take mg of ibuprofen" for number in range(9)
    ]
    texts = [prompts().prefix_ids([Message("user", text)]) for text in words]
    keys = np.unique(ngram_rows(texts).keys)
    keys = keys[rng.random(len(keys)) < 0.5]
    weight = rng.standard_normal(HIDDEN_SIZE).astype(np.float32)
    bias = float(np.float32(rng.standard_normal()))
    return Head(weight, bias, random_words(rng, keys))


def reference_logit(messages: tuple[Message, ...], rule_text: str, folder: Path) -> float:
    """weight . state + bias, with the state after the final norm in plain transformers, or in PEFT
    if there is an adapter beside the head, and what the words say.
    """
    prompt = prompts().build(messages, rule_text)
    model = base_model()
    if (folder / PEFT_CONFIG).is_file():
        model = peft_model(str(folder), torch.float32)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([prompt.token_ids]), output_hidden_states=True)
    state = output.hidden_states[-1][0, -1].double().numpy()
    tensors = load_file(folder / HEAD_FILE)
    of_state = float(tensors["weight"].astype(np.float64) @ state)
    counted: Sequence[int] = prompt.token_ids[: prompt.invocation_start]
    if load_card(folder).reads == "last user":
        counted = prompts().turn_ids([turn for turn in messages if turn.role == "user"][-1])
    return of_state + plain_word_logit(tensors, counted) + float(tensors["bias"][0])
