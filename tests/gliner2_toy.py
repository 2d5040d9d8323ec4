"""A small random GLiNER2, made and saved by the package gliner2, and what it says with plain PEFT.
Tests only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gliner2.configuration import ExtractorConfig
from gliner2.models.span.model import SpanExtractorModel
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DebertaV2Config, DebertaV2Tokenizer, PreTrainedTokenizerFast

from guard.conversation.example import Message
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import text_hash
from tests import toy_tokenizers
from tests.serve import cards

ENCODER_TARGETS = ("query_proj", "key_proj", "value_proj", "dense")
CLASSIFIER_TARGETS = ("classifier.0", "classifier.2")
TARGETS = ENCODER_TARGETS + CLASSIFIER_TARGETS
WINDOW = 96


@functools.cache
def wordpiece() -> PreTrainedTokenizerFast:
    """MiniLM's."""
    file = Path(load_recipe("minilm").base_path) / "tokenizer.json"
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_file=str(file), **names)


@functools.cache
def unigram() -> PreTrainedTokenizerFast:
    """DeBERTa-v3's kind, which tells letters' case apart, with few words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    text = ["The assistant must not give medical advice. My head hurts, and a knee: 800 mg [a](b)"]
    trained = toy_tokenizers.unigram(text * 20, special, "[UNK]")
    scores = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    vocabulary = [(piece, 0.0 if piece in special else -float(id_)) for piece, id_ in scores]
    return DebertaV2Tokenizer(vocab=vocabulary)


def fresh() -> Any:
    """gliner2's model with the same random weights each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
    encoder = DebertaV2Config(
        **{"vocab_size": 30522, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes},
        **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        **{"position_biased_input": False, "type_vocab_size": 0, "share_att_key": True},
        **{"norm_rel_ebd": "layer_norm", "initializer_range": 0.2},
    )
    config = ExtractorConfig(architecture="span", max_width=8, counting_layer="count_lstm_v2")
    return SpanExtractorModel(config, encoder_config=encoder, tokenizer=wordpiece()).eval()


def save_base(folder: Path) -> Path:
    """Its folder, as gliner2 publishes one."""
    fresh().save_pretrained(folder)
    return folder


def gliner2_recipe(base: Path, **replaced: object) -> Recipe:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS)}
    fields: dict[str, object] = {
        **{"name": "toy", "kind": "gliner2", "base": str(base), "dtype": "float32"},
        **{"context_tokens": 1024, "window_tokens": WINDOW},
        "trainer": {"max_steps": 20, "eval_steps": 10, "per_device_train_batch_size": 8},
        "methods": {"lora": {"lora": lora, "trainer": {"learning_rate": 1e-2}}},
        "engine": {"max_lora_rank": 8, "max_loras": 4, "enforce_eager": True},
    }
    return Recipe.model_validate(fields | replaced)


def save_adapter(folder: Path, *, seed: int, rank: int, targets: Sequence[str]) -> Path:
    """A random adapter of gliner2's own model."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False
    )
    get_peft_model(fresh(), config).save_pretrained(str(folder))
    return folder


def save_card(folder: Path, recipe: Recipe, rule_text: str) -> None:
    cards.save_card(
        folder,
        folder.name,
        "lora",
        **{"rule_text": rule_text, "rule_hash": text_hash(rule_text), "model": recipe.name},
        **{"prompt_hash": Gliner2PromptBuilder.of(recipe).hash, "base": recipe.base},
        **{"base_revision": recipe.base_revision, "temperature": 1.0, "threshold": 0.5},
        uncertainty_band=(0.5, 0.5),
    )


def adapted(folder: Path | None) -> Any:
    """gliner2's model, with the adapter of a folder in plain PEFT."""
    model = fresh()
    if folder is not None:
        PeftModel.from_pretrained(model, str(folder))
    return model.eval()


def reference_logit(
    model: Any, builder: Gliner2PromptBuilder, messages: Sequence[Message], rule_text: str
) -> float:
    """The highest window's logit by gliner2's encoder and classifier, each window alone."""
    logits: list[float] = []
    for window in builder.windows(builder.build(messages, rule_text).token_ids, "conversation"):
        label = window.token_ids.index(builder.label_id)
        with torch.inference_mode():
            states = model.encoder(input_ids=torch.tensor([window.token_ids])).last_hidden_state
            logits.append(float(model.classifier(states[0, label])))
    return max(logits)
