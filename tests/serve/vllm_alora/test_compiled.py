"""A compiled engine answers as PEFT does, whatever adapters its steps hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from vllm.config import CompilationMode
from vllm_alora.compiled import check_and_update_config

from guard.errors import GuardError
from guard.example import Message
from serve.engine import GuardEngine
from tests.serve.engine.shared import core_of
from tests.serve.guarded import (
    CONVERSATION,
    ENGINE,
    RULE_TEXTS,
    adapter_folders,
    peft_logit,
    recipe,
)

pytestmark = pytest.mark.slow

NATS = 2e-3  # float32: two ways to compute the same logit


@pytest.fixture(scope="module")
def compiled() -> Iterator[GuardEngine]:
    """Two adapters in slots at a time, of four."""
    engine = ENGINE | {"max_loras": 2, "enforce_eager": False}
    with GuardEngine(recipe(), adapter_folders(), **engine) as compiled:
        yield compiled


def test_the_model_is_compiled_with_adapters_on(compiled: GuardEngine) -> None:
    config = core_of(compiled).vllm_config
    assert config.compilation_config.mode == CompilationMode.DYNAMO_TRACE_ONCE
    assert config.lora_config is not None


def test_every_adapter_s_logit_is_peft_s_in_every_step(compiled: GuardEngine) -> None:
    """Other adapters in the slots, other tokens, a step without any: nothing was baked in."""
    names = list(RULE_TEXTS)
    for asked in (names, names[:1], names[2:], [*reversed(names)]):
        compiled.forget()
        for verdict in compiled.check(CONVERSATION, asked).verdicts:
            text = RULE_TEXTS[verdict.rule]
            expected = peft_logit(CONVERSATION, text, adapter_folders()[verdict.rule])
            assert verdict.logit == pytest.approx(expected, abs=NATS)
    longer = (*CONVERSATION, Message("user", "and what if it hurts again tomorrow?"))
    for verdict in compiled.check(longer).verdicts:
        expected = peft_logit(longer, RULE_TEXTS[verdict.rule], adapter_folders()[verdict.rule])
        assert verdict.logit == pytest.approx(expected, abs=NATS)


def test_an_operator_changes_the_output_of_its_own_layer_alone() -> None:
    vllm_alora.register()
    from vllm_alora import compiled as module

    added: list[tuple[Any, ...]] = []

    class Layer:
        lora_a_stacked, lora_b_stacked, output_slices = "a", "b", (3,)

        @property
        def punica_wrapper(self) -> Layer:
            return self

        def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *weights: Any) -> None:
            added.append(weights)
            y.add_(x.sum())

    layer = Layer()
    module._layers[-1] = layer
    output, x = torch.zeros(1, 2, 3), torch.ones(1, 2, 4)
    torch.ops.vllm_alora.add_low_rank(output, x, -1)
    assert output.tolist() == [[[8.0] * 3] * 2] and added == [("a", "b", 1.0, (3,))]
    with pytest.raises(KeyError):
        torch.ops.vllm_alora.add_low_rank(output, x, -2)


def test_an_error_of_the_platform_leaves_the_adapters_on() -> None:
    adapters = object()
    config = SimpleNamespace(lora_config=adapters)

    def refuse(_: type, given: Any) -> None:
        assert given.lora_config is None
        raise GuardError("no", remedy="none")

    with pytest.raises(GuardError):
        check_and_update_config.wrapper(refuse, object, config)
    assert config.lora_config is adapters
