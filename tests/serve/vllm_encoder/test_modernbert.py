"""ModernBERT with adapters, each with a head of its own, against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import ModernBertConfig

from tests.serve.vllm_encoder.parity import ServedToy, served
from tests.serve.vllm_encoder.toy import HIDDEN, VOCABULARY, ToyEncoder

pytestmark = pytest.mark.slow

TARGETS = ("Wqkv", "Wi", "Wo", "dense")


def config(layers: int) -> ModernBertConfig:
    return ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=128,
        local_attention=16,
        initializer_range=0.2,
        initializer_cutoff_factor=2.0,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
        cls_token_id=101,
        sep_token_id=102,
    )


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedToy]:
    root = tmp_path_factory.mktemp("modernbert")
    with served(ToyEncoder.of(config(layers=4), root / "base"), root, TARGETS) as engine:
        yield engine


def test_a_mixed_batch_is_peft_s_by_rule(modernbert: ServedToy) -> None:
    modernbert.check()


def test_a_compiled_one_says_the_same(tmp_path: Path) -> None:
    """Of two layers, which attend to all and to their neighbours."""
    toy = ToyEncoder.of(config(layers=2), tmp_path / "base")
    with served(toy, tmp_path, TARGETS, is_compiled=True) as engine:
        engine.check()
