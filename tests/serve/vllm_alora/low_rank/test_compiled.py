"""A compiled engine answers as PEFT does, whatever adapters its steps hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from pytest import MonkeyPatch
from vllm.config import CompilationMode
from vllm_alora.low_rank import compiled as seams

from guard.conversation.example import Message
from serve.engine import GuardEngine
from tests.serve.cards import RULE_TEXTS, recipe
from tests.serve.engine.shared import assert_peft, core_of, runner, steps_of
from tests.serve.guarded import CONVERSATION, ENGINE, adapter_folders

pytestmark = pytest.mark.slow

SAME_NATS = 1e-4  # more is another type's rounding
NARROW_NATS = 0.1  # bfloat16 against float32
COMPILED = ENGINE | {"max_loras": 2, "enforce_eager": False}


@pytest.fixture(scope="module")
def compiled() -> Iterator[GuardEngine]:
    """Two adapters in slots at a time, of four."""
    with GuardEngine(recipe(), adapter_folders(), **COMPILED) as compiled:
        yield compiled


def test_every_logit_is_peft_s_in_every_step_of_a_compiled_model(compiled: GuardEngine) -> None:
    """Other adapters in the slots, other tokens, a step without any: nothing was baked in."""
    config = core_of(compiled).vllm_config
    assert config.compilation_config.mode == CompilationMode.DYNAMO_TRACE_ONCE
    assert config.lora_config is not None
    names = list(RULE_TEXTS)
    for asked in (names, names[:1], names[2:], [*reversed(names)]):
        compiled.forget()
        assert_peft(compiled, asked)
    longer = (*CONVERSATION, Message("user", "and what if it hurts again tomorrow?"))
    assert_peft(compiled, messages=longer)


def test_two_compiled_engines_each_have_their_own_adapters(compiled: GuardEngine) -> None:
    """Of one base and one configuration: what is compiled for one may be kept for the other."""
    swapped = {"pii_leak": adapter_folders()["pii_leak"]}
    with GuardEngine(recipe(), swapped, **COMPILED) as second:
        for served in (second, compiled, second):
            served.forget()
            assert_peft(served)


def test_a_compiled_engine_in_bfloat16_computes_in_chunks_and_begins_again(
    compiled: GuardEngine,
) -> None:
    """As it is served by default where the processor multiplies bfloat16."""
    exact, narrow_engine = assert_peft(compiled), COMPILED | {"dtype": "bfloat16"}
    with GuardEngine(recipe(), adapter_folders(), **narrow_engine) as narrow:
        whole = assert_peft(narrow, nats=NARROW_NATS)
        # A product rounded to 8 bits a layer; the last layer's are not rounded.
        assert max(abs(whole[rule] - exact[rule]) for rule in exact) > SAME_NATS
        narrow.forget()
        model_runner = runner(narrow)
        model_runner._model_forward, forward = None, model_runner._model_forward
        with pytest.raises(TypeError):
            narrow.check(CONVERSATION)
        model_runner._model_forward = forward
        with steps_of(narrow, 24):
            for verdict in narrow.check(CONVERSATION).verdicts:
                assert verdict.logit == pytest.approx(whole[verdict.rule], abs=NARROW_NATS)


def test_two_compiled_layers_of_one_name_are_refused(monkeypatch: MonkeyPatch) -> None:
    """One would be computed with the other's adapters; without the compiler none is looked up."""

    def enter(mode: CompilationMode, *names: str) -> None:
        compilation = SimpleNamespace(static_forward_context={}, mode=mode)
        config = SimpleNamespace(compilation_config=compilation)
        monkeypatch.setattr(seams, "get_current_vllm_config_or_none", lambda: config)
        for name in names:
            seams.init.wrapper(lambda *_: None, SimpleNamespace(), SimpleNamespace(prefix=name))

    enter(CompilationMode.NONE, "layers.0.q", "layers.0.q")
    enter(CompilationMode.DYNAMO_TRACE_ONCE, "layers.0.q", "layers.1.q")
    with pytest.raises(ValueError, match=r"called 'layers\.0\.q'.*with enforce_eager"):
        enter(CompilationMode.DYNAMO_TRACE_ONCE, "layers.0.q", "layers.0.q")
