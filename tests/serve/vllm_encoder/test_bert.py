"""The model that the plugin registers: it takes adapters, and leaves their heads to the caller."""

from __future__ import annotations

import pytest

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
