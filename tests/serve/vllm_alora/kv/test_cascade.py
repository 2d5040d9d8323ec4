"""One read of a context for all that share it answers as one read each: in PEFT, and in plain
softmaxes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm_alora.kv import cascade, shared_context
from vllm_alora.kv.cascade import LAYOUTS, Readers, attend, own_rows
from vllm_alora.kv.shared_context import Batch, SharedContext

from tests.serve.adapters import save_variant
from tests.serve.served import Served
from tests.serve.vllm_alora.test_parity import assert_peft, invocation_of, text_ids

pytestmark = pytest.mark.slow

HEADS, KEY_HEADS, SIZE, BLOCK = 6, 2, 64, 32


def readers_of(first_rows: list[int], lengths: list[int], dtype: torch.dtype) -> Readers:
    """Requests that begin at these rows of a step and compute so many tokens each."""

    class Step(Batch):
        @property
        def first_rows(self) -> Any:
            return np.array(first_rows)

    count = len(lengths)
    step = Step(
        np.zeros((count, 8), np.int32),
        np.zeros((count, 1)),
        np.zeros(count),
        np.array(lengths),
        np.zeros(count),
        BLOCK,
    )
    context = SharedContext(70, tuple(range(count)), None)
    return cascade._readers(step, context, HEADS // KEY_HEADS, dtype)


def attention_of_a_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """One row [heads, size] to tokens [tokens, heads of keys, size], in float64."""
    shared_by = HEADS // KEY_HEADS
    key, value = (part.double().repeat_interleave(shared_by, 1) for part in (key, value))
    weights = torch.einsum("hd,thd->ht", query.double() * scale, key).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, value)


@pytest.mark.parametrize(
    ("first_rows", "lengths"),
    [
        ([2, 5, 8, 11], [3, 3, 3, 3]),
        ([9, 0, 20], [4, 1, 7]),
        ([number * 3 for number in range(40)], [3] * 40),
        ([0, 60], [60, 60]),
    ],
    ids=["side by side", "apart, of several lengths", "several tiles", "longer than a tile"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_attention_in_two_parts_is_attention(
    first_rows: list[int], lengths: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    readers = readers_of(first_rows, lengths, dtype)
    torch.manual_seed(0)
    query = torch.randn(130, HEADS, SIZE).to(dtype)
    key, value = torch.randn(2, 130, KEY_HEADS, SIZE).to(dtype)
    context = torch.randn(2, 70, KEY_HEADS, SIZE).to(dtype)
    output = torch.empty_like(query)
    output[readers.rows] = attend(query, key, value, (context[0], context[1]), readers, 0.125)
    attended = output[readers.rows]
    expected = []
    for first, length in zip(first_rows, lengths, strict=True):
        for row in range(first, first + length):
            keys = torch.cat([context[0], key[first : row + 1]])
            values = torch.cat([context[1], value[first : row + 1]])
            expected.append(attention_of_a_row(query[row], keys, values, 0.125))
    torch.testing.assert_close(
        attended.double(), torch.stack(expected), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("spoilt", ["key", "value"])
def test_one_request_s_nan_reaches_nobody_else(spoilt: str) -> None:
    first_rows = [number * 3 for number in range(8)]
    readers = readers_of(first_rows, [3] * 8, torch.float32)
    query = torch.randn(24, HEADS, SIZE)
    step = {"key": torch.randn(24, KEY_HEADS, SIZE), "value": torch.randn(24, KEY_HEADS, SIZE)}
    context = (torch.randn(70, KEY_HEADS, SIZE), torch.randn(70, KEY_HEADS, SIZE))
    whole = attend(query, step["key"], step["value"], context, readers, 0.125)
    step[spoilt][9:12] = torch.nan
    attended = attend(query, step["key"], step["value"], context, readers, 0.125)
    others = [*range(9), *range(12, 24)]
    torch.testing.assert_close(attended[others], whole[others], atol=2e-6, rtol=2e-6)
    assert attended[9:12].isnan().all()


def test_a_row_of_a_tile_attends_to_its_own_request_up_to_itself() -> None:
    mask = own_rows(2, 2, 1, torch.float32)
    assert mask.isfinite().int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
    assert torch.equal(own_rows(2, 2, 3, torch.float32), mask.repeat(3, 1))


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)],
    ids=str,
)
def test_keys_and_values_are_read_out_of_the_cache_as_they_were_written(
    isa: str, dtype: torch.dtype
) -> None:
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
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Contexts are read once from a block on; those that were, one layer of each step: how many
    requests read it, and whether the step computed it.
    """
    read: list[tuple[int, bool]] = []

    def build(*args: Any) -> Readers:
        context = args[1]
        read.append((len(context.requests), context.computed_at is not None))
        return original(*args)

    original = cascade._readers
    monkeypatch.setattr(cascade, "_readers", build)
    monkeypatch.setattr(shared_context, "MIN_TOKENS", BLOCK)
    monkeypatch.setattr(shared_context, "MIN_READS", 0)
    return read


def variants(adapters: dict[str, str], folder: Path, count: int) -> list[str]:
    return [
        save_variant(folder / str(seed), adapters["second"], seed=seed) for seed in range(count)
    ]


def test_rules_on_a_conversation_read_it_once_and_answer_as_in_peft(
    served: Served,
    adapters: dict[str, str],
    tmp_path: Path,
    contexts: list[tuple[int, bool]],
) -> None:
    """New, then from the cache, where other suffixes read it; of several lengths each."""
    folders: list[str | None] = [*variants(adapters, tmp_path, 6)]
    conversation = [*text_ids(75, seed=8), *invocation_of(adapters["second"])]
    served.ask([conversation] * 6, folders)  # reads the adapters
    served.reset()
    for seed, is_new in ((0, True), (100, False)):  # computed by the first of them, then cached
        prompts = [[*conversation, *text_ids(3 + number % 5, seed + number)] for number in range(6)]
        contexts.clear()
        assert_peft(served.ask(prompts, folders), prompts, folders)
        readers, was_new = contexts[0]
        assert readers > 1 and was_new == is_new  # how many have their adapter by then may differ


def test_a_step_of_several_conversations_base_requests_and_loras_answers_as_in_peft(
    served: Served,
    adapters: dict[str, str],
    tmp_path: Path,
    contexts: list[tuple[int, bool]],
) -> None:
    aloras = variants(adapters, tmp_path, 4)
    prompts, folders = [], list[str | None]()
    for seed in range(3):
        conversation = [*text_ids(64 + 9 * seed, seed), *invocation_of(adapters["second"])]
        for number, folder in enumerate([None, *aloras, adapters["lora"], None]):
            prompts.append([*conversation, *text_ids(4, 10 * seed + number)])
            folders.append(folder)
    served.ask(prompts, folders)  # reads the adapters
    served.reset()
    contexts.clear()
    assert_peft(served.ask(prompts, folders), prompts, folders)
    assert_peft(served.ask(prompts, folders), prompts, folders)
    assert len([readers for readers, _ in contexts if readers >= 4]) >= 3
    assert len({is_new for _, is_new in contexts}) == 2


def test_in_bfloat16_rules_that_lie_apart_in_a_step_answer_as_without_it(
    adapters: dict[str, str],
    tmp_path: Path,
    contexts: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Served.start(dtype="bfloat16", kv_cache_memory_bytes=2**26)
    try:
        folders = variants(adapters, tmp_path, 4)
        prompts, asked = [], list[str | None]()
        for number, folder in enumerate([*folders, *folders]):
            conversation = text_ids(75, seed=number % 2)  # two conversations in turn
            ids = [*conversation, *invocation_of(adapters["second"]), *text_ids(3, number)]
            prompts.append(ids)
            asked.append(folder)
        engine.ask(prompts, asked)
        assert [readers for readers, _ in contexts if readers > 1]
        with_cascade = engine.ask(prompts, asked)
        monkeypatch.setattr(shared_context, "MIN_READS", 10**9)
        for answer, alone in zip(with_cascade, engine.ask(prompts, asked), strict=True):
            torch.testing.assert_close(answer.log_probs, alone.log_probs, atol=0.15, rtol=0.02)
    finally:
        engine.close()


def test_layers_that_attend_otherwise_are_left_to_vllm(
    served: Served, monkeypatch: pytest.MonkeyPatch, contexts: list[tuple[int, bool]]
) -> None:
    prompts = [[*text_ids(75, 8), *text_ids(4, number)] for number in range(4)]
    monkeypatch.setattr(cascade, "_is_plain", lambda attention: False)
    for group in served.runner.attn_groups[0]:
        vars(group.get_metadata_builder(0)).pop("can_cascade", None)
    assert_peft(served.ask(prompts, [None] * 4), prompts, [None] * 4)
    assert contexts == []
    for group in served.runner.attn_groups[0]:
        vars(group.get_metadata_builder(0)).pop("can_cascade", None)
