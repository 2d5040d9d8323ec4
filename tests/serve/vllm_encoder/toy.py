"""Small random encoders with rules on them, whose engine says what plain PEFT says. Tests only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForTokenClassification, PreTrainedConfig

from guard.conversation.example import Message
from guard.method import METHODS
from guard.recipe import Recipe, load_recipe
from guard.rule import Reads
from guard.weights.head import Head
from serve.engine import GuardEngine, ScoreRequest
from tests.serve.encoder_rules import (
    reference_logit,
    save_encoder_card,
    save_encoder_rule,
    words_of,
)
from tests.serve.engine.shared import logits as logits_of

PARITY = 1e-5
HIDDEN = 64
VOCABULARY = 30522  # of MiniLM's tokenizer
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONGER = (Message("user", "My knee hurts whenever I run, and my back when I sit for long."),)
WINDOWS = (Message("user", "Tell me a story."), Message("assistant", "A knee hurt. " * 60))
TEXTS = (SHORT, WINDOWS, LONGER)


@dataclass(frozen=True)
class ToyEncoder:
    """A random checkpoint with MiniLM's tokenizer, and what its adapters target."""

    recipe: Recipe
    targets: Sequence[str]

    @classmethod
    def of(cls, config: PreTrainedConfig, targets: Sequence[str], folder: Path) -> ToyEncoder:
        torch.manual_seed(0)
        AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
        shutil.copy(Path(load_recipe("minilm").base_path) / "tokenizer.json", folder)
        fields = {
            "name": "toy",
            "kind": "encoder",
            "base": str(folder),
            "dtype": "float32",
            "context_tokens": 1024,
            "window_tokens": 96,
            "rule_turn": "none",
            "methods": {"lora": {}, "head": {}},
            "engine": {"max_lora_rank": 8, "max_loras": 4, "max_num_batched_tokens": 1024},
        }
        return cls(Recipe.model_validate(fields), targets)

    def save_rule(self, folder: Path, seed: int, *targets: str) -> Path:
        """A random adapter with a random head and words; without targets on all."""
        on = targets or self.targets
        return save_encoder_rule(folder, seed=seed, targets=on, texts=TEXTS, of=self.recipe)

    def save_low_rule(self, folder: Path, seed: int, reads: Reads) -> Path:
        """The same of a low rank, without words."""
        return save_encoder_rule(
            folder, seed=seed, rank=2, targets=self.targets, reads=reads, of=self.recipe
        )

    def save_head(self, folder: Path, reads: Reads) -> Path:
        """A random head on the frozen encoder, with words."""
        folder.mkdir()
        weight = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
        head = Head(weight, 0.125, words_of(TEXTS, 0, self.recipe))
        save_file(head.tensors(), folder / METHODS["head"].weights)
        save_encoder_card(folder, "head", self.recipe, reads=reads)
        return folder


@dataclass(frozen=True)
class ServedToy:
    """A toy encoder, its engine, and the folders of its rules."""

    toy: ToyEncoder
    engine: GuardEngine
    rules: dict[str, Path]

    def check(self) -> None:
        """Every rule on conversations of three lengths in one batch; and a logit alone."""
        requests: list[ScoreRequest] = []
        expected: list[float] = []
        for messages in TEXTS:
            for name, folder in self.rules.items():
                requests.append(ScoreRequest(messages, "", name))
                expected.append(reference_logit(messages, folder, self.toy.recipe))
        assert logits_of(self.engine.score(requests)) == pytest.approx(expected, abs=PARITY)
        for request, logit in zip(requests, expected, strict=True):
            if request.messages is SHORT:
                assert logits_of(self.engine.score([request])) == pytest.approx([logit], abs=PARITY)


@contextmanager
def served(toy: ToyEncoder, root: Path, *, is_compiled: bool = False) -> Iterator[ServedToy]:
    """An engine with a rule on all targets, one of a low rank, one on each alone, and a head; two
    of them read one speaker. It is compiled by default on a CPU, here where a test asks for it.
    """
    rules = {
        "all": toy.save_rule(root / "all", 1),
        "low": toy.save_low_rule(root / "low", 2, "user"),
        "head": toy.save_head(root / "head", "assistant"),
        "last": toy.save_low_rule(root / "last", 3, "last user"),
        "last head": toy.save_head(root / "last-head", "last conversation"),
    }
    for seed, target in enumerate(toy.targets, start=3):
        rules[target] = toy.save_rule(root / target, seed, target)
    with GuardEngine(toy.recipe, rules, enforce_eager=not is_compiled) as engine:
        yield ServedToy(toy, engine, rules)
