"""One read of a context for all that share it answers as one read each, in PEFT."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm_alora.compiler import compiled
from vllm_alora.kv import cascade
from vllm_alora.kv.cascade import LAYOUTS, Readers, is_native
from vllm_alora.kv.native_attention import NativeAttention
from vllm_alora.kv.shared_context import Worth
from vllm_alora.kv.tiled_attention import TiledAttention

from tests.serve.adapters import save_variant
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import CheckedEngine, invocation_of, text_ids

pytestmark = pytest.mark.slow

KEY_HEADS, SIZE, BLOCK = 2, 64, 32


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)],
    ids=str,
)
def test_keys_and_values_are_read_as_they_were_written(isa: str, dtype: torch.dtype) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("a CPU without AMX")
    kv_cache = torch.zeros(9, KEY_HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    key_cache, value_cache = kv_cache.view(9, KEY_HEADS, 2 * BLOCK, -1).chunk(2, dim=2)
    key, value = torch.randn(2, 3 * BLOCK, KEY_HEADS, SIZE).to(dtype)
    blocks = torch.tensor([5, 2, 7])
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    keys, values = LAYOUTS[isa](kv_cache[blocks])
    assert torch.equal(keys, key) and torch.equal(values, value)


@pytest.fixture
def contexts(monkeypatch: MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each context that one layer reads once: its readers, and whether the step computed it."""
    read: list[tuple[int, bool]] = []

    def build(*args: Any) -> Readers:
        context = args[-1]
        read.append((len(context.requests), context.computed_at is not None))
        return original(*args)

    original = cascade._readers
    monkeypatch.setattr(cascade, "_readers", build)
    for attention in (NativeAttention, TiledAttention):
        monkeypatch.setattr(attention, "worth", Worth(BLOCK, 0))
    return read


def builders(served: Served) -> list[Any]:
    return [group.get_metadata_builder(0) for group in served.runner.attn_groups[0]]


@pytest.fixture(params=[True, False], ids=["in C++", "by PyTorch"])
def attention(request: pytest.FixtureRequest, served: Served, monkeypatch: MonkeyPatch) -> None:
    """Shared contexts are attended to in one of the two ways."""
    for builder in builders(served):
        monkeypatch.setattr(builder, "native_attention", request.param)


ALORAS = [str(seed) for seed in range(6)]


@pytest.fixture
def variants(adapters: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The adapters of all tests, and ALORAS."""
    second = adapters["second"]
    return adapters | {
        name: save_variant(tmp_path / name, second, seed=int(name)) for name in ALORAS
    }


@pytest.fixture
def checked(served: Served, variants: dict[str, str]) -> CheckedEngine:
    return CheckedEngine(served, variants)


@pytest.mark.usefixtures("attention")
def test_rules_on_a_conversation_read_it_once_and_answer_as_in_peft(
    checked: CheckedEngine, contexts: list[tuple[int, bool]]
) -> None:
    """New, then from the cache, where other suffixes read it; of several lengths each."""
    conversation = [*text_ids(75, seed=8), *checked.invocation]
    checked.ask([conversation] * 6, ALORAS)  # reads the adapters
    checked.served.reset()
    for seed, is_new in ((0, True), (100, False)):  # computed by the first of them, then cached
        prompts = [[*conversation, *text_ids(3 + number % 5, seed + number)] for number in range(6)]
        contexts.clear()
        checked.ask(prompts, ALORAS)
        readers, was_new = contexts[0]
        assert readers > 1 and was_new == is_new  # how many have their adapter by then may differ


@pytest.mark.usefixtures("attention")
def test_a_step_of_several_conversations_base_requests_and_loras_answers_as_in_peft(
    checked: CheckedEngine, contexts: list[tuple[int, bool]]
) -> None:
    prompts: list[list[int]] = []
    kinds: list[str | None] = [None, *ALORAS[:4], "lora", None]
    for seed in range(3):
        conversation = [*text_ids(64 + 9 * seed, seed), *checked.invocation]
        for number in range(len(kinds)):
            prompts.append([*conversation, *text_ids(4, 10 * seed + number)])
    checked.ask(prompts, kinds * 3)  # reads the adapters
    checked.served.reset()
    contexts.clear()
    for _ in range(2):
        checked.ask(prompts, kinds * 3)
    assert len([readers for readers, _ in contexts if readers >= 4]) >= 3
    assert len({is_new for _, is_new in contexts}) == 2


def test_in_bfloat16_rules_that_lie_apart_in_a_step_answer_as_without_it(
    variants: dict[str, str], contexts: list[tuple[int, bool]], monkeypatch: MonkeyPatch
) -> None:
    engine = Served.start(dtype="bfloat16", kv_cache_memory_bytes=2**26)
    try:
        asked = [variants[name] for name in ALORAS[:4]] * 2
        prompts = []
        for number, folder in enumerate(asked):
            conversation = text_ids(75, seed=number % 2)  # two conversations in turn
            prompts.append([*conversation, *invocation_of(folder), *text_ids(3, number)])
        engine.ask(prompts, asked)
        assert [readers for readers, _ in contexts if readers > 1]
        contexts.clear()  # the second time all of it is in the cache
        with_cascade = engine.ask(prompts, asked)
        assert [readers for readers, _ in contexts if readers > 1]
        for attention in (NativeAttention, TiledAttention):
            monkeypatch.setattr(attention, "worth", Worth(0, 10**9))
        for answer, alone in zip(with_cascade, engine.ask(prompts, asked), strict=True):
            torch.testing.assert_close(answer.log_probs, alone.log_probs, atol=0.15, rtol=0.02)
    finally:
        engine.close()


def test_layers_that_attend_otherwise_are_left_to_vllm(
    checked: CheckedEngine, monkeypatch: MonkeyPatch, contexts: list[tuple[int, bool]]
) -> None:
    prompts = [[*text_ids(75, 8), *text_ids(4, number)] for number in range(4)]
    checked.ask(prompts, [None] * 4)
    assert contexts  # which the same prompts have in common where layers are plain
    with monkeypatch.context() as patched:
        patched.setattr(cascade, "_is_plain", lambda attention: False)
        others = [cascade._can_cascade(builder) for builder in builders(checked.served)]
    for builder, can_cascade in zip(builders(checked.served), others, strict=True):
        monkeypatch.setattr(builder, "can_cascade", can_cascade)
    checked.served.reset()
    contexts.clear()
    checked.ask(prompts, [None] * 4)
    assert contexts == []


@pytest.mark.parametrize("runner", ["supports_mm_inputs", "enable_prompt_embeds"])
def test_ids_say_little_of_images(served: Served, monkeypatch: MonkeyPatch, runner: str) -> None:
    tokens = dict.fromkeys(served.runner.input_batch.req_ids, 4)
    lent: list[Any] = []
    monkeypatch.setattr(served.runner, runner, True)
    cascade.build_attention_metadata.wrapper(
        lambda *args, **kwargs: lent.append(cascade._batch.get()),
        served.runner,
        num_scheduled_tokens=tokens or {"none": 1},
    )
    assert lent == [None]


PLAIN = {
    "attn_type": AttentionType.DECODER,
    "sliding_window": -1,
    "logits_soft_cap": 0,
    "alibi_slopes": None,
    "sinks": None,
    "is_fp8_kv_cache": False,
    "kv_sharing_target_layer_name": None,
}
OTHERS = {
    "attn_type": AttentionType.ENCODER_ONLY,
    "sliding_window": 128,
    "logits_soft_cap": 30.0,
    "alibi_slopes": torch.ones(6),
    "sinks": torch.ones(6),
    "is_fp8_kv_cache": True,
    "kv_sharing_target_layer_name": "model.layers.3.self_attn.attn",
}


def test_a_plain_layer_attends_to_everything_before_a_token() -> None:
    assert cascade._is_plain(SimpleNamespace(**PLAIN))
    for name, other in OTHERS.items():
        assert not cascade._is_plain(SimpleNamespace(**(PLAIN | {name: other}))), name


def test_a_builder_that_makes_requests_of_its_own_is_left_to_vllm(served: Served) -> None:
    class ChunkedBuilder(CPUAttentionMetadataBuilder):
        pass

    for builder in builders(served):
        other = ChunkedBuilder.__new__(ChunkedBuilder)
        vars(other).update(vars(builder))
        assert cascade._can_cascade(builder) and not cascade._can_cascade(other)


def test_an_engine_attends_in_c_if_it_is_faster(served: Served, monkeypatch: MonkeyPatch) -> None:
    has_tiles = torch.cpu._is_amx_tile_supported()
    assert [builder.native_attention for builder in builders(served)] == [not has_tiles]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert is_native({}, torch.bfloat16, 128)
    assert not is_native({}, torch.float16, 128)
    assert not is_native({}, torch.float32, 80)
    assert not is_native({cascade.NATIVE: False}, torch.float32, 64)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not is_native({}, torch.bfloat16, 128)


def test_without_a_compiler_pytorch_attends_and_the_log_says_so(monkeypatch: MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(cascade.logger, "warning_once", lambda *texts: warnings.append(texts[0]))
    monkeypatch.setenv("CXX", "none")
    compiled.cache_clear()
    assert not is_native({}, torch.float32, 64)
    assert "slower" in warnings[0]
    monkeypatch.delenv("CXX")
    assert is_native({}, torch.float32, 64)
