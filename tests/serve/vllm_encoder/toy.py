"""Small random encoders with rules on them, and what plain PEFT says of them. Tests only."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForTokenClassification, PreTrainedConfig

from guard.conversation.example import Message
from guard.method import METHODS, WORDS
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import judged_of
from guard.recipe import Recipe, load_recipe
from guard.rule import Reads
from guard.weights.card import read_card
from guard.weights.head import Head, WordWeights
from tests.plain_words import file_of_words, plain_word_logit, random_words
from tests.serve.encoder_rules import save_encoder_card

HIDDEN = 64
VOCABULARY = 30522  # of MiniLM's tokenizer
WINDOW = 96
LOW_RANK = 2
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONGER = (Message("user", "My knee hurts whenever I run, and my back when I sit for long."),)
WINDOWS = (Message("user", "Tell me a story."), Message("assistant", "A knee hurt. " * 60))


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

    @property
    def builder(self) -> EncoderPromptBuilder:
        return EncoderPromptBuilder.of(self.recipe)

    def base(self) -> torch.nn.Module:
        path = self.recipe.base_path
        model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(path, num_labels=2)
        return model.eval()

    def save_rule(
        self,
        folder: Path,
        seed: int,
        rank: int,
        targets: Sequence[str],
        reads: Reads = "conversation",
    ) -> Path:
        """A random adapter with a random head and, where its rank is high, words."""
        torch.manual_seed(seed)
        config = LoraConfig(
            task_type="TOKEN_CLS",
            r=rank,
            lora_alpha=2 * rank,
            target_modules=list(targets),
            init_lora_weights=False,
        )
        adapted = get_peft_model(self.base(), config)  # type: ignore[arg-type]
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
        if rank > LOW_RANK:
            save_file(self._words(seed).tensors(), folder / WORDS)
        self.save_card(folder, "lora", reads)
        return folder

    def save_head(self, folder: Path, reads: Reads = "conversation") -> Path:
        """A random head on the frozen encoder."""
        folder.mkdir()
        weight = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
        head = Head(weight, 0.125, self._words(0))
        save_file(head.tensors(), folder / METHODS["head"].weights)
        self.save_card(folder, "head", reads)
        return folder

    def _words(self, seed: int) -> WordWeights:
        texts = [self.builder.prefix_ids(messages) for messages in (SHORT, WINDOWS, LONGER)]
        ngrams = np.unique(ngram_rows(texts).keys)[::2]
        return random_words(np.random.default_rng(seed), ngrams)

    def save_card(self, folder: Path, method: str, reads: Reads = "conversation") -> None:
        save_encoder_card(
            folder,
            method,
            prompt_hash=self.builder.hash,
            reads=reads,
            model="toy",
            base=self.recipe.base,
            base_revision=self.recipe.base_revision,
        )

    def reference_logit(self, messages: Sequence[Message], folder: Path) -> float:
        """The highest mean logit of what the rule judges, window by window, each alone."""
        model = self.base()
        head = folder / METHODS["head"].weights
        if head.is_file():
            model.classifier = torch.nn.Identity()
        else:
            model = PeftModel.from_pretrained(model, str(folder)).eval()  # type: ignore[arg-type]
        logits: list[float] = []
        reads, words = read_card(folder).reads, file_of_words(folder)
        for window in self.builder.windows(self.builder.prefix_ids(messages), reads):
            with torch.inference_mode():
                outputs = model(input_ids=torch.tensor([window.token_ids])).logits[0].numpy()
            for start, end, speaker, _ in self.builder.spans(window):
                mean = outputs[start:end].mean(axis=0)
                logit = float(mean[-1] - mean[0])
                if head.is_file():
                    tensors = load_file(head)
                    logit = float(mean @ tensors["weight"] + tensors["bias"][0])
                if words and judged_of([speaker], reads):
                    logit += plain_word_logit(load_file(words), window.token_ids[start:end])
                logits.append(logit)
        return max(logits)
