"""RoBERTa and XLM-RoBERTa with adapters and heads against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import RobertaConfig, XLMRobertaConfig

from tests.serve.vllm_encoder.parity import ServedToy, served
from tests.serve.vllm_encoder.toy import HIDDEN, VOCABULARY, ToyEncoder

pytestmark = pytest.mark.slow

TARGETS = ("query", "key", "value", "dense")
PADDING = 1  # positions begin behind it


def fields(layers: int) -> dict[str, Any]:
    """The fields of a toy's configuration."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": 98,  # exactly a window, and those that are not used
        "type_vocab_size": 1,
        "initializer_range": 0.2,
        "pad_token_id": PADDING,
        "bos_token_id": 101,
        "eos_token_id": 102,
    }


@pytest.fixture(scope="module", params=[RobertaConfig, XLMRobertaConfig])
def roberta(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedToy]:
    root = tmp_path_factory.mktemp("roberta")
    toy = ToyEncoder.of(request.param(**fields(layers=4)), root / "base")
    with served(toy, root, TARGETS) as engine:
        yield engine


def test_a_mixed_batch_is_peft_s_rule_by_rule(roberta: ServedToy) -> None:
    roberta.check()


def test_a_compiled_one_says_the_same(tmp_path: Path) -> None:
    """As MiniLM is compiled: it is the same class of vLLM's, with other embeddings."""
    toy = ToyEncoder.of(RobertaConfig(**fields(layers=2)), tmp_path / "base")
    with served(toy, tmp_path, TARGETS, is_compiled=True) as engine:
        engine.check()
