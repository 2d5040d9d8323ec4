"""Encoders with adapters and heads against transformers and PEFT: RoBERTa, XLM-RoBERTa, ModernBERT,
and DeBERTa of several kinds; the padded rows of the latter. BERT is compared in
tests/serve/engine/backends/test_encoder.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from transformers import (
    DebertaV2Config,
    ModernBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from guard.errors import GuardError
from tests.serve.encoder_rules import save_encoder_card
from tests.serve.vllm_encoder.toy import HIDDEN, VOCABULARY, ToyEncoder, served

pytestmark = pytest.mark.slow


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}
ROBERTA: dict[str, Any] = {
    **SIZES,
    "num_attention_heads": 2,
    "max_position_embeddings": 98,  # exactly a window, and those that are not used
    "type_vocab_size": 1,
    "pad_token_id": 1,  # positions begin behind it
    "bos_token_id": 101,
    "eos_token_id": 102,
}


def modernbert(layers: int) -> ModernBertConfig:
    return ModernBertConfig(
        **(SIZES | {"num_hidden_layers": layers}),
        num_attention_heads=2,
        max_position_embeddings=128,
        local_attention=16,
        initializer_cutoff_factor=2.0,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
        cls_token_id=101,
        sep_token_id=102,
    )


def deberta(**fields: Any) -> DebertaV2Config:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
    v3 = {"share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    others = {"num_attention_heads": 4, "max_position_embeddings": 128}
    others |= {"position_biased_input": False}
    return DebertaV2Config(**(SIZES | relative | v3 | others | fields))


OF_BERT = ("query", "key", "value", "dense")
OF_MODERNBERT = ("Wqkv", "Wi", "Wo", "dense")
OF_DEBERTA = ("query_proj", "key_proj", "value_proj", "dense")
# Name -> a configuration, and what its adapters target.
KINDS: dict[str, tuple[PreTrainedConfig, Sequence[str]]] = {
    "RoBERTa": (RobertaConfig(**ROBERTA), OF_BERT),
    "XLM-RoBERTa": (XLMRobertaConfig(**ROBERTA), OF_BERT),
    "ModernBERT": (modernbert(layers=4), OF_MODERNBERT),
    "DeBERTa v3": (deberta(), OF_DEBERTA),
    "DeBERTa with projections of its own": (
        deberta(
            share_att_key=False,
            position_buckets=-1,
            norm_rel_ebd="none",
            position_biased_input=True,
            type_vocab_size=2,
        ),
        (*OF_DEBERTA, "pos_key_proj", "pos_query_proj"),
    ),
    "DeBERTa with a convolution": (deberta(conv_kernel_size=3, conv_act="gelu"), OF_DEBERTA),
    "DeBERTa with absolute positions": (
        deberta(
            relative_attention=False,
            position_buckets=-1,
            norm_rel_ebd="none",
            position_biased_input=True,
        ),
        OF_DEBERTA,
    ),
    "DeBERTa with positions one way": (
        deberta(pos_att_type=["c2p"], embedding_size=32),
        (*OF_DEBERTA, "embed_proj"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_is_peft_s_by_rule_and_a_tensor_that_has_no_place_is_refused(
    kind: str, tmp_path: Path
) -> None:
    """vLLM would drop it silently; `self_attn` is another library's name for `self`."""
    toy = ToyEncoder.of(*KINDS[kind], tmp_path / "base")
    with served(toy, tmp_path) as of_kind:
        of_kind.check()
        folder = toy.save_rule(tmp_path / "odd", 1)
        weights = folder / "adapter_model.safetensors"
        tensors = load_file(weights)
        renamed = {re.sub(r"\.(self|attn)\.", ".self_attn.", key): tensors[key] for key in tensors}
        save_file(renamed, weights)
        save_encoder_card(folder, "lora", toy.recipe)
        with pytest.raises(GuardError, match=r"layers that the engine cannot adapt.*self_attn"):
            of_kind.engine.add("odd", folder)


@pytest.mark.parametrize(
    ("config", "targets"),
    # As MiniLM is compiled: the same class of vLLM's, with other embeddings; and two layers, which
    # attend to all and to their neighbours.
    [KINDS["RoBERTa"], (modernbert(layers=2), OF_MODERNBERT)],
    ids=["RoBERTa", "ModernBERT"],
)
def test_a_compiled_one_says_the_same(
    config: PreTrainedConfig, targets: Sequence[str], tmp_path: Path
) -> None:
    with served(
        ToyEncoder.of(config, targets, tmp_path / "base"), tmp_path, is_compiled=True
    ) as toy:
        toy.check()


def test_padded_rows_are_of_like_length_and_hold_each_token_once_and_none_of_the_tail(
    monkeypatch: MonkeyPatch,
) -> None:
    from vllm_encoder import rows

    monkeypatch.setattr(rows, "BLOCK_SCORES", 2 * 10 * 10)  # few
    starts = [0, 10, 14, 14, 24, 34, 35]  # one is empty; what lies behind 35 is padding
    blocks = rows.padded_rows(starts, 8, torch.device("cpu"))
    assert [block.sequences for block in blocks] == [(0, 3), (4,), (1,), (5,)]
    flat = torch.arange(1.0, 41.0).unsqueeze(1)
    written = torch.zeros_like(flat)
    for block in blocks:
        block.put(written, block.of(flat))
    assert torch.equal(written[:35], flat[:35]) and not written[35:].any()


def test_only_a_dry_run_has_no_metadata() -> None:
    """Metadata that are not understood would put several sequences into one row."""
    from vllm.forward_context import override_forward_context
    from vllm_encoder.rows import bounds

    of_layer = SimpleNamespace(query_start_loc=torch.tensor([0, 3, 9]))
    for metadata, expected in ((None, [0, 8, 10]), ({"attention": of_layer}, [0, 3, 9])):
        with override_forward_context(SimpleNamespace(attn_metadata=metadata)):  # type: ignore[arg-type]
            assert bounds("attention", 10, 8) == expected
    micro_batches = SimpleNamespace(attn_metadata=[{"attention": of_layer}])
    with override_forward_context(micro_batches), pytest.raises(TypeError, match="is a list"):  # type: ignore[arg-type]
        bounds("attention", 10, 8)
