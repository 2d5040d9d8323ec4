"""Which requests of a step read the same keys and values; one read for all of them answers as one
read each, in PEFT.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from vllm_alora.kv.shared_context import (
    MAX_QUERY,
    Batch,
    SharedContext,
    Worth,
    shared_contexts,
)
from vllm_alora.kv.tiled_attention import TiledAttention

from tests.serve.adapters import save_variant
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import CheckedEngine, text_ids

pytestmark = pytest.mark.slow

KEY_HEADS, SIZE, BLOCK = 2, 64, 32
WHOLE, CONTEXT = 4, 10  # tokens: two whole blocks and two tokens
WORTH = Worth(6, 2 * 3 * CONTEXT)


def batch(requests: int = 3, **changes: Any) -> Batch:
    """Requests with 10 tokens in common, 3 of their own, and a last block of their own."""
    blocks = np.tile(np.array([7, 5, 0, 0], np.int32), (requests, 1))
    blocks[:, 2] = 10 + np.arange(requests)
    token_ids = np.tile(np.arange(16, dtype=np.int32), (requests, 1))
    token_ids[:, CONTEXT:] += 100 * np.arange(requests)[:, None]
    fields = {
        "blocks": blocks,
        "token_ids": token_ids,
        "computed": np.full(requests, CONTEXT),
        "scheduled": np.full(requests, 3),
        "base_tokens": np.full(requests, CONTEXT),
        "block_size": WHOLE,
    }
    return Batch(**(fields | changes))


def test_requests_with_the_same_blocks_and_the_same_tokens_behind_them_share_a_context() -> None:
    assert shared_contexts(batch(), WORTH) == [SharedContext(CONTEXT, (0, 1, 2), None)]
    for little in (Worth(CONTEXT + 1, 0), Worth(0, 3 * 3 * CONTEXT + 1)):
        assert shared_contexts(batch(), little) == []
    two = batch(6)
    two.blocks[3:, 0] = 9
    assert shared_contexts(two, WORTH) == [
        SharedContext(CONTEXT, (0, 1, 2), None),
        SharedContext(CONTEXT, (3, 4, 5), None),
    ]


@pytest.mark.parametrize(
    ("field", "place", "value"),
    [
        ("blocks", (1, 0), 8),
        ("token_ids", (1, CONTEXT - 1), 99),  # behind the last whole block
        ("computed", 1, CONTEXT - 1),
        ("base_tokens", 1, CONTEXT - 1),  # an adapter has computed some of it
        ("scheduled", 1, MAX_QUERY + 1),  # much of its own: it reads alone
    ],
)
def test_what_differs_is_another_context(field: str, place: Any, value: int) -> None:
    other = batch(4)
    getattr(other, field)[place] = value
    assert shared_contexts(other, WORTH) == [SharedContext(CONTEXT, (0, 2, 3), None)]


@pytest.mark.parametrize(
    ("computed", "base_tokens", "computed_at"),
    [(0, CONTEXT, 0), (WHOLE, CONTEXT, None), (0, WHOLE, None)],
)
def test_a_context_of_which_the_base_computes_all_in_the_step_is_found_in_it(
    computed: int, base_tokens: int, computed_at: int | None
) -> None:
    with_leader = batch(
        4,
        computed=np.array([computed, CONTEXT, CONTEXT, CONTEXT]),
        scheduled=np.array([13, 3, 3, 3]),
        base_tokens=np.array([base_tokens, CONTEXT, CONTEXT, CONTEXT]),
    )
    expected = SharedContext(CONTEXT, (1, 2, 3), computed_at)
    assert shared_contexts(with_leader, WORTH) == [expected]


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
def checked(served: Served, adapters: dict[str, str], tmp_path: Path) -> CheckedEngine:
    """The session's engine, with ALORAS beside the adapters of all tests."""
    variants = {}
    for name in ALORAS:
        variants[name] = save_variant(tmp_path / name, adapters["second"], seed=int(name))
    return CheckedEngine(served, adapters | variants)


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
    checked: CheckedEngine, contexts: list[tuple[int, bool]], monkeypatch: MonkeyPatch
) -> None:
    with Served.start(dtype="bfloat16", kv_cache_memory_bytes=2**26) as engine:
        folders = [checked.adapters[name] for name in ALORAS[:4]] * 2
        prompts = []
        for number in range(len(folders)):
            conversation = text_ids(75, seed=number % 2)  # two conversations in turn
            prompts.append([*conversation, *checked.invocation, *text_ids(3, number)])
        for _ in range(2):  # the second time all of it is in the cache
            contexts.clear()
            with_cascade = engine.ask(prompts, folders)
            assert [readers for readers, _ in contexts if readers > 1]
        for attention in (NativeAttention, TiledAttention):
            monkeypatch.setattr(attention, "worth", Worth(0, 10**9))
        for answer, alone in zip(with_cascade, engine.ask(prompts, folders), strict=True):
            torch.testing.assert_close(answer.log_probs, alone.log_probs, atol=0.15, rtol=0.02)


def test_layers_that_attend_otherwise_are_left_to_vllm(
    checked: CheckedEngine, monkeypatch: MonkeyPatch, contexts: list[tuple[int, bool]]
) -> None:
    prompts = [[*text_ids(75, 8), *text_ids(4, number)] for number in range(4)]
    checked.ask(prompts, [None] * 4)
    assert contexts  # which the same prompts have in common where layers are plain
    monkeypatch.setattr(cascade, "_is_plain", lambda attention: False)
    for builder in builders(checked.served):
        monkeypatch.setattr(builder, "can_cascade", cascade._can_cascade(builder))
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


# Of a layer's attributes: what a plain one has, and what another may have.
ATTENDS: dict[str, tuple[Any, Any]] = {
    "attn_type": (AttentionType.DECODER, AttentionType.ENCODER_ONLY),
    "sliding_window": (-1, 128),
    "logits_soft_cap": (0, 30.0),
    "alibi_slopes": (None, torch.ones(6)),
    "sinks": (None, torch.ones(6)),
    "is_fp8_kv_cache": (False, True),
    "kv_sharing_target_layer_name": (None, "model.layers.3.self_attn.attn"),
}


def test_only_layers_and_builders_are_taken_that_attend_plainly(served: Served) -> None:
    """To everything before a token, and of a builder that makes no requests of its own."""
    plain = {name: value for name, (value, _) in ATTENDS.items()}
    assert cascade._is_plain(SimpleNamespace(**plain))
    for name, (_, other) in ATTENDS.items():
        assert not cascade._is_plain(SimpleNamespace(**(plain | {name: other}))), name

    class ChunkedBuilder(CPUAttentionMetadataBuilder):
        pass

    for builder in builders(served):
        chunked = ChunkedBuilder.__new__(ChunkedBuilder)
        vars(chunked).update(vars(builder))
        assert cascade._can_cascade(builder) and not cascade._can_cascade(chunked)


def test_an_engine_attends_in_cpp_where_it_is_faster_and_compiles(
    served: Served, monkeypatch: MonkeyPatch
) -> None:
    has_tiles = torch.cpu._is_amx_tile_supported()
    assert [builder.native_attention for builder in builders(served)] == [not has_tiles]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert is_native({}, torch.bfloat16, 128) and is_native({}, torch.float32, 256)
    for settings, dtype, size in (
        ({}, torch.float16, 128),
        ({}, torch.float32, 80),
        ({}, torch.bfloat16, 2048),
        ({cascade.NATIVE: False}, torch.float32, 64),
    ):
        assert not is_native(settings, dtype, size)
    warnings: list[str] = []
    monkeypatch.setattr(cascade.logger, "warning_once", lambda *texts: warnings.append(texts[0]))
    with monkeypatch.context() as patched:
        patched.setenv("CXX", "none")
        compiled.cache_clear()
        assert not is_native({}, torch.float32, 64)
    assert "slower" in warnings[0]
    assert is_native({}, torch.float32, 64)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not is_native({}, torch.bfloat16, 128)
