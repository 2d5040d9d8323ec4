"""Which requests of a step read the same keys and values; one read for all of them answers as one
read each, in PEFT.
"""

from __future__ import annotations

from copy import copy
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
from vllm_alora.kv.cascade import Readers, from_vectors, is_native
from vllm_alora.kv.native_attention import NativeAttention
from vllm_alora.kv.shared_context import Worth

from tests.serve.adapters import save_variant
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import CheckedEngine, text_ids

pytestmark = pytest.mark.slow

KEY_HEADS, SIZE, BLOCK = 2, 64, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("isa", "block"), [("vec", 32), ("vec16", 16)])
def test_keys_and_values_are_read_as_they_were_written(
    dtype: torch.dtype, isa: str, block: int
) -> None:
    kv_cache = torch.zeros(9, KEY_HEADS, block, 2 * SIZE, dtype=dtype)
    key_cache, value_cache = kv_cache.view(9, KEY_HEADS, 2 * block, -1).chunk(2, dim=2)
    key, value = torch.randn(2, 3 * block, KEY_HEADS, SIZE).to(dtype)
    blocks = torch.tensor([5, 2, 7])
    slots = (blocks[:, None] * block + torch.arange(block)).flatten()
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    keys, values = from_vectors(kv_cache[blocks])
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
    monkeypatch.setattr(NativeAttention, "worth", Worth(BLOCK, 0))
    return read


def builders(served: Served) -> list[Any]:
    return [group.get_metadata_builder(0) for group in served.runner.attn_groups[0]]


ALORAS = [str(seed) for seed in range(4)]


@pytest.fixture
def checked(served: Served, adapters: dict[str, str], tmp_path: Path) -> CheckedEngine:
    """The session's engine, with ALORAS beside the adapters of all tests."""
    variants = {}
    for name in ALORAS:
        variants[name] = save_variant(tmp_path / name, adapters["second"], seed=int(name))
    return CheckedEngine(served, adapters | variants)


def test_rules_on_conversations_read_each_once_and_answer_as_in_peft(
    checked: CheckedEngine, contexts: list[tuple[int, bool]]
) -> None:
    """In one step with base requests and LoRAs, those of a conversation apart from each other, with
    suffixes of several lengths. New, computed by the first of them, then from the cache.
    Conversations have whole blocks in common and differ behind them.
    """
    prompts: list[list[int]] = []
    asked: list[str | None] = []
    for number, kind in enumerate((None, *ALORAS, "lora", None)):
        for seed in range(3):
            conversation = [*text_ids(64, 0), *text_ids(9 * seed, seed), *checked.invocation]
            prompts.append([*conversation, *text_ids(3 + number % 5, 10 * seed + number)])
            asked.append(kind)
    checked.ask(prompts, asked)  # reads the adapters
    checked.served.reset()
    contexts.clear()
    for _ in range(2):
        checked.ask(prompts, asked)
    assert len([readers for readers, _ in contexts if readers >= 4]) >= 3
    assert len({is_new for _, is_new in contexts}) == 2


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
    (builder,) = builders(served)
    assert builder.can_cascade
    other = copy(builder)
    for isa, dtype, is_cascading in (
        ("amx", torch.bfloat16, False),
        ("vec16", torch.bfloat16, True),  # AMX and blocks of 16: vLLM does not use the tiles
        ("vec", torch.float16, False),
    ):
        vars(other).update(isa=isa, dtype=dtype)
        assert cascade.cascades(other) == is_cascading
    assert is_native(torch.bfloat16, 128) and is_native(torch.float32, 256)
    for dtype, size in ((torch.float16, 128), (torch.float32, 80), (torch.bfloat16, 2048)):
        assert not is_native(dtype, size)
    warnings: list[str] = []
    monkeypatch.setattr(cascade.logger, "warning_once", lambda *texts: warnings.append(texts[0]))
    with monkeypatch.context() as patched:
        patched.setenv("CXX", "none")
        compiled.cache_clear()
        assert not is_native(torch.float32, 64)
        assert not cascade.cascades(builder)
    assert "slower" in warnings[0]
    assert is_native(torch.float32, 64)
