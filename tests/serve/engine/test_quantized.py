"""Rules on a base in 8 bits: the engine's answers are plain PEFT's on the same rounded products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from guard.conversation.example import Message
from guard.machine.device import INT8_FLAGS, cpu_info
from guard.method import PEFT_WEIGHTS
from guard.recipe import Recipe
from serve.engine import GuardEngine
from tests.serve.cards import prompts, recipe, save_card, text_of
from tests.serve.engine.shared import logits_of
from tests.serve.guarded import ENGINE, METHOD, save_adapter
from train.adapter.trained import verdict_logits
from train.base import load_base_in

pytestmark = pytest.mark.usefixtures("own_cache")
FLAGS = set(cpu_info("flags").split())
RULES = ("medical_advice", "plain")
WORDS = ["the", "refund", "of", "my", "knee,", "which", "dose", "of", "it", "and", "when?"] * 12
CONVERSATIONS = [(Message("user", " ".join(WORDS[:words])),) for words in range(8, 120, 9)]


def save_rule(on: Recipe, folder: Path, layers: int) -> None:
    save_adapter(folder, folder.name, seed=layers, method=METHOD[folder.name])
    tensors = load_file(folder / PEFT_WEIGHTS).items()
    first = {key: it for key, it in tensors if int(key.split(".layers.")[1][0]) < layers}
    save_file(first, folder / PEFT_WEIGHTS)
    save_card(folder, folder.name, METHOD[folder.name], base_revision=on.base_revision)


def plain_logits(on: Recipe, quantization: str | None, folder: Path) -> np.ndarray:
    base: Any = load_base_in(quantization, on, torch.device("cpu"))
    model = PeftModel.from_pretrained(base, str(folder))
    asked = [prompts().build(messages, text_of(folder.name)) for messages in CONVERSATIONS]
    return np.array(verdict_logits(model, asked, prompts()))


@pytest.mark.slow
@pytest.mark.skipif(not FLAGS & INT8_FLAGS, reason="no int8")
@pytest.mark.parametrize(("layers", "share"), [(1, 0.1), (6, 1.0)])
def test_the_engine_answers_as_peft(tmp_path: Path, layers: int, share: float) -> None:
    """To a `share` of what rounding changes: of a last digit that differs each layer makes more."""
    dtype = "bfloat16" if "amx_int8" in FLAGS else "float32"
    stated = {"dtype": dtype, "engine": recipe().engine | {"dtype": dtype}, "layers": layers}
    served = recipe().model_copy(update=stated | {"serving_quantization": "int8"})
    folders = {rule: tmp_path / rule for rule in RULES}
    for folder in folders.values():
        save_rule(served, folder, layers)
    with GuardEngine(served, folders, **ENGINE) as engine:
        answers = [logits_of(engine.check(messages)) for messages in CONVERSATIONS]
    for answered, folder in zip(np.transpose(answers), folders.values(), strict=True):
        rounded, whole = (plain_logits(served, it, folder) for it in ("int8", None))
        assert np.abs(answered - rounded).mean() < share * np.abs(whole - rounded).mean()
