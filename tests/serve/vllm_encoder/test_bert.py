"""RoBERTa and XLM-RoBERTa with adapters and heads against transformers and PEFT.

BERT is compared in tests/serve/engine/backends/test_encoder.py.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import Recipe, load_recipe
from guard.rule import Reads
from guard.weights.head import Head
from serve.engine import GuardEngine, ScoreRequest
from tests.serve import encoder_rules
from tests.serve.engine.shared import logits as logits_of

pytestmark = pytest.mark.slow

PARITY = 1e-5
HIDDEN = 64
TARGETS = ("query", "key", "value", "dense")  # of adapters
VOCABULARY = 30522  # of MiniLM's tokenizer
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONGER = (Message("user", "My knee hurts whenever I run, and my back when I sit for long."),)
WINDOWS = (Message("user", "Tell me a story."), Message("assistant", "A knee hurt. " * 60))
TEXTS = (SHORT, WINDOWS, LONGER)


@dataclass(frozen=True)
class ToyEncoder:
    """A random checkpoint with MiniLM's tokenizer."""

    recipe: Recipe

    @classmethod
    def of(cls, config: transformers.PreTrainedConfig, folder: Path) -> ToyEncoder:
        torch.manual_seed(0)
        transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
        shutil.copy(Path(load_recipe("minilm").base_path) / "tokenizer.json", folder)
        fields: dict[str, Any] = {
            "name": "toy",
            "kind": "encoder",
            "base": str(folder),
            "dtype": "float32",
        }
        fields |= {"context_tokens": 1024, "window_tokens": 96, "rule_turn": "none"}
        fields |= {"dtype": "float32", "methods": {"lora": {}, "head": {}}}
        fields |= {"engine": {"max_lora_rank": 8, "max_loras": 4, "max_num_batched_tokens": 1024}}
        return cls(Recipe.model_validate(fields))

    def save_rule(self, folder: Path, seed: int, *targets: str) -> Path:
        """A random adapter with a random head and words; without targets on all."""
        on = targets or TARGETS
        return encoder_rules.save_encoder_rule(
            folder, seed=seed, targets=on, texts=TEXTS, of=self.recipe
        )

    def save_low_rule(self, folder: Path, seed: int, reads: Reads) -> Path:
        """The same of a low rank, without words."""
        return encoder_rules.save_encoder_rule(
            folder, seed=seed, rank=2, targets=TARGETS, reads=reads, of=self.recipe
        )

    def save_head(self, folder: Path, reads: Reads) -> Path:
        """A random head on the frozen encoder, with words."""
        folder.mkdir()
        weight = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
        head = Head(weight, 0.125, encoder_rules.words_of(TEXTS, 0, self.recipe))
        save_arrays(head.tensors(), folder / METHODS["head"].weights)
        encoder_rules.save_encoder_card(folder, "head", self.recipe, reads=reads)
        return folder

    def save_rules(self, root: Path) -> dict[str, Path]:
        """A rule on all targets, two of a low rank, one on each alone, and two heads, which read
        different speakers.
        """
        rules = {
            "all": self.save_rule(root / "all", 1),
            "low": self.save_low_rule(root / "low", 2, "user"),
            "head": self.save_head(root / "head", "assistant"),
            "last": self.save_low_rule(root / "last", 3, "last user"),
            "last head": self.save_head(root / "last-head", "last conversation"),
        }
        for seed, target in enumerate(TARGETS, start=3):
            rules[target] = self.save_rule(root / target, seed, target)
        return rules


def assert_peft(engine: GuardEngine, rules: dict[str, Path], recipe: Recipe) -> None:
    """Every rule on conversations of three lengths in one batch; and a logit alone."""
    requests: list[ScoreRequest] = []
    expected: list[float] = []
    for messages in TEXTS:
        for name, folder in rules.items():
            requests.append(ScoreRequest(messages, "", name))
            expected.append(encoder_rules.reference_logit(messages, folder, recipe))
    assert logits_of(engine.score(requests)) == pytest.approx(expected, abs=PARITY)
    for request, logit in zip(requests, expected, strict=True):
        if request.messages is SHORT:
            assert logits_of(engine.score([request])) == pytest.approx([logit], abs=PARITY)


SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 2, "initializer_range": 0.2}
ROBERTA: dict[str, Any] = {
    **SIZES,
    "num_attention_heads": 2,
    "max_position_embeddings": 98,  # exactly a window, and those that are not used
    "type_vocab_size": 1,
    "pad_token_id": 1,  # positions begin behind it
    "bos_token_id": 101,
    "eos_token_id": 102,
}


KINDS: dict[str, transformers.PreTrainedConfig] = {
    "RoBERTa": transformers.RobertaConfig(**ROBERTA),
    "XLM-RoBERTa": transformers.XLMRobertaConfig(**ROBERTA),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_is_peft_s_by_rule_and_a_tensor_that_has_no_place_is_refused(
    kind: str, tmp_path: Path
) -> None:
    """vLLM would drop it silently; `self_attn` is another library's name for `self`."""
    toy = ToyEncoder.of(KINDS[kind], tmp_path / "base")
    rules = toy.save_rules(tmp_path)
    with GuardEngine(toy.recipe, rules, enforce_eager=True) as engine:
        assert_peft(engine, rules, toy.recipe)
        folder = toy.save_rule(tmp_path / "odd", 1)
        weights = folder / "adapter_model.safetensors"
        tensors = load_file(weights)
        renamed = {re.sub(r"\.self\.", ".self_attn.", key): tensors[key] for key in tensors}
        save_file(renamed, weights)
        encoder_rules.save_encoder_card(folder, "lora", toy.recipe)
        with pytest.raises(GuardError, match=r"layers that the engine cannot adapt.*self_attn"):
            engine.add("odd", folder)


def test_a_compiled_one_says_the_same(tmp_path: Path) -> None:
    """As MiniLM is compiled: the same class of vLLM's, with other embeddings."""
    toy = ToyEncoder.of(KINDS["RoBERTa"], tmp_path / "base")
    rules = toy.save_rules(tmp_path)
    with GuardEngine(toy.recipe, rules, enforce_eager=False) as engine:
        assert_peft(engine, rules, toy.recipe)
