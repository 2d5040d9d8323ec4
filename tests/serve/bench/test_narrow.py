"""The narrow base is a base of the recipe's architecture with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.bench.narrow import narrow_base
from tests.serve.cards import recipe
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow


def test_it_has_one_layer_the_same_tokens_and_is_gone_afterwards() -> None:
    whole = recipe()
    with narrow_base(whole) as narrow:
        model = AutoModelForCausalLM.from_pretrained(narrow.base_path)
        assert len(model.model.layers) == 1 and model.config.hidden_size == 64
        wide = AutoConfig.from_pretrained(whole.base_path)
        assert model.config.architectures == wide.architectures
        prompts = PromptBuilder.of(narrow)
        assert prompts.prefix_ids(CONVERSATION) == PromptBuilder.of(whole).prefix_ids(CONVERSATION)
        folder = Path(narrow.base)
    assert not folder.exists()


def test_a_base_of_the_hub_is_refused_with_the_one_that_will_do() -> None:
    remote = recipe().model_copy(update={"base": "Qwen/Qwen3-4B"})
    with pytest.raises(GuardError, match=r"narrow base.*MODEL=tiny"), narrow_base(remote):
        pass
