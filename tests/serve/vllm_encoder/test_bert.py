"""BERT, RoBERTa and XLM-RoBERTa with adapters and heads against transformers and PEFT. BERT is
compared in tests/serve/engine/backends/test_encoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import RobertaConfig, XLMRobertaConfig

from tests.serve.vllm_encoder.parity import ServedToy, served
from tests.serve.vllm_encoder.toy import HIDDEN, VOCABULARY, ToyEncoder

pytestmark = pytest.mark.slow


def test_the_registered_model_takes_adapters_and_gives_the_states_of_all_tokens() -> None:
    import vllm_encoder

    vllm_encoder.register()
    vllm_encoder.register()  # twice does no harm
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    from serve.engine.backends.arguments import ENCODERS

    assert set(ENCODERS.values()) <= set(vllm_encoder.MODELS)
    assert set(vllm_encoder.MODELS) <= ModelRegistry.get_supported_archs()
    from vllm_encoder.bert import BertForGuarding

    assert supports_lora(BertForGuarding)
    assert BertForGuarding.lora_skip_prefixes == ["classifier."]


TARGETS = ("query", "key", "value", "dense")
PADDING = 1  # positions begin behind it


def fields() -> dict[str, Any]:
    """The fields of a toy's configuration."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
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
    toy = ToyEncoder.of(request.param(**fields()), root / "base")
    with served(toy, root, TARGETS) as engine:
        yield engine


def test_a_mixed_batch_is_peft_s_by_rule(roberta: ServedToy) -> None:
    roberta.check()


def test_a_compiled_one_says_the_same(tmp_path: Path) -> None:
    """As MiniLM is compiled: it is the same class of vLLM's, with other embeddings."""
    toy = ToyEncoder.of(RobertaConfig(**fields()), tmp_path / "base")
    with served(toy, tmp_path, TARGETS, is_compiled=True) as engine:
        engine.check()
