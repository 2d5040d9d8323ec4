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
from transformers import DebertaV2Config, PreTrainedTokenizerFast

from guard.recipe import load_recipe

ENCODER_TARGETS = ("query_proj", "key_proj", "value_proj", "dense")
CLASSIFIER_TARGETS = ("classifier.0", "classifier.2")
TARGETS = ENCODER_TARGETS + CLASSIFIER_TARGETS


@functools.cache
def wordpiece() -> PreTrainedTokenizerFast:
    """MiniLM's."""
    file = Path(load_recipe("minilm").base_path) / "tokenizer.json"
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_file=str(file), **names)


def fresh() -> Any:
    """gliner2's model with the same random weights each time."""
    torch.manual_seed(0)
    encoder = DebertaV2Config(
        vocab_size=30522,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.2,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        share_att_key=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
    )
    config = ExtractorConfig(architecture="span", max_width=8, counting_layer="count_lstm_v2")
    return SpanExtractorModel(config, encoder_config=encoder, tokenizer=wordpiece()).eval()


def save_base(folder: Path) -> Path:
    """Its folder, as gliner2 publishes one."""
    fresh().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, *, seed: int, rank: int, targets: Sequence[str]) -> Path:
    """A random adapter of gliner2's own model."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False
    )
    get_peft_model(fresh(), config).save_pretrained(str(folder))
    return folder


def adapted(folder: Path | None) -> Any:
    """gliner2's model, with the adapter of a folder in plain PEFT."""
    model = fresh()
    if folder is not None:
        PeftModel.from_pretrained(model, str(folder))
    return model.eval()
