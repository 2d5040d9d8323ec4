"""DeBERTa of several kinds with adapters against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import DebertaV2Config

from guard.errors import GuardError
from tests.serve.encoder_rules import save_encoder_card
from tests.serve.vllm_encoder.parity import ServedToy, served
from tests.serve.vllm_encoder.toy import HIDDEN, VOCABULARY, ToyEncoder

pytestmark = pytest.mark.slow

TARGETS = ("query_proj", "key_proj", "value_proj", "dense")
OWN_PROJECTIONS = ("pos_key_proj", "pos_query_proj")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
V3: dict[str, Any] = {"share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
# Name -> what the configuration has beside SHAPE, and what its adapters target.
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "v3": (V3, TARGETS),
    "own projections": (
        {"share_att_key": False, "position_biased_input": True, "type_vocab_size": 2},
        TARGETS + OWN_PROJECTIONS,
    ),
    "convolution": (V3 | {"conv_kernel_size": 3, "conv_act": "gelu"}, TARGETS),
    "absolute": (
        {"relative_attention": False, "share_att_key": True, "position_biased_input": True},
        TARGETS,
    ),
    "one way": (V3 | {"pos_att_type": ["c2p"], "embedding_size": 32}, (*TARGETS, "embed_proj")),
}


@pytest.fixture(scope="module", params=KINDS)
def deberta(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedToy]:
    fields, targets = KINDS[request.param]
    root = tmp_path_factory.mktemp("deberta")
    toy = ToyEncoder.of(DebertaV2Config(**(SHAPE | fields)), root / "base")
    with served(toy, root, targets) as engine:
        yield engine


def test_a_mixed_batch_is_peft_s_by_rule(deberta: ServedToy) -> None:
    deberta.check()


def test_a_tensor_that_has_no_place_is_refused(deberta: ServedToy, tmp_path: Path) -> None:
    """vLLM would drop it silently; `self_attn` is another library's name for `self`."""
    folder = deberta.toy.save_rule(tmp_path / "odd", 1, 8, TARGETS)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    renamed = {key.replace(".self.", ".self_attn."): value for key, value in tensors.items()}
    save_file(renamed, weights)
    save_encoder_card(folder, "lora", deberta.toy.recipe)
    with pytest.raises(GuardError, match=r"layers that the engine cannot adapt.*self_attn"):
        deberta.engine.add("odd", folder)
