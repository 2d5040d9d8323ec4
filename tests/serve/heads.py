"""Heads with random weights and cards, and what plain transformers says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from guard.example import Message
from guard.method import METHODS
from tests.serve.adapters import base_model
from tests.serve.guarded import prompts, save_card

HIDDEN_SIZE = int(base_model().config.hidden_size)
HEAD_FILE = METHODS["head"].weights


def save_head(folder: Path, name: str, *, seed: int, **card: object) -> Path:
    """A random head with a card, as training would have left it; `card` are fields of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(HIDDEN_SIZE).astype(np.float32)
    bias = rng.standard_normal(1).astype(np.float32)
    save_file({"weight": weight, "bias": bias}, folder / HEAD_FILE)
    save_card(folder, name, "head", **card)
    return folder


def reference_logit(messages: tuple[Message, ...], rule_text: str, folder: Path) -> float:
    """weight . state + bias in plain transformers, with the state after the final norm."""
    prompt = prompts().build(messages, rule_text).token_ids
    with torch.no_grad():
        output = base_model().model(input_ids=torch.tensor([prompt]))
    state = output.last_hidden_state[0, -1].double().numpy()
    tensors = load_file(folder / HEAD_FILE)
    return float(tensors["weight"].astype(np.float64) @ state + tensors["bias"][0])
