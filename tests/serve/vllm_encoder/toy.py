"""Small random encoders with rules on them, and what plain PEFT says of them. Tests only."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForTokenClassification, PreTrainedConfig

from guard.conversation.example import Message
from guard.method import METHODS
from guard.recipe import Recipe, load_recipe
from guard.rule import Reads
from guard.weights.head import Head
from tests.serve.encoder_rules import save_encoder_card, save_encoder_rule, words_of

HIDDEN = 64
VOCABULARY = 30522  # of MiniLM's tokenizer
WINDOW = 96
LOW_RANK = 2
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONGER = (Message("user", "My knee hurts whenever I run, and my back when I sit for long."),)
WINDOWS = (Message("user", "Tell me a story."), Message("assistant", "A knee hurt. " * 60))
TEXTS = (SHORT, WINDOWS, LONGER)


@dataclass(frozen=True)
class ToyEncoder:
    """A random checkpoint with MiniLM's tokenizer."""

    recipe: Recipe

    @classmethod
    def of(cls, config: PreTrainedConfig, folder: Path) -> ToyEncoder:
        torch.manual_seed(0)
        AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
        shutil.copy(Path(load_recipe("minilm").base_path) / "tokenizer.json", folder)
        fields = {
            "name": "toy",
            "kind": "encoder",
            "base": str(folder),
            "dtype": "float32",
            "context_tokens": 1024,
            "window_tokens": WINDOW,
            "rule_turn": "none",
            "methods": {"lora": {}, "head": {}},
            "engine": {"max_lora_rank": 8, "max_loras": 4, "max_num_batched_tokens": 1024},
        }
        return cls(Recipe.model_validate(fields))

    def save_rule(
        self,
        folder: Path,
        seed: int,
        rank: int,
        targets: Sequence[str],
        reads: Reads = "conversation",
    ) -> Path:
        """A random adapter with a random head and, where its rank is high, words."""
        texts = TEXTS if rank > LOW_RANK else ()
        return save_encoder_rule(
            folder,
            seed=seed,
            rank=rank,
            targets=targets,
            reads=reads,
            texts=texts,
            of=self.recipe,
        )

    def save_head(self, folder: Path, reads: Reads = "conversation") -> Path:
        """A random head on the frozen encoder, with words."""
        folder.mkdir()
        weight = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
        head = Head(weight, 0.125, words_of(TEXTS, 0, self.recipe))
        save_file(head.tensors(), folder / METHODS["head"].weights)
        save_encoder_card(folder, "head", self.recipe, reads=reads)
        return folder
