"""Attention in C++ is attention: on every kind of vector, for every size that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm_alora.compiler import compiled
from vllm_alora.kv.native_attention import NativeAttention, is_faster

from tests.serve.vllm_alora.kv import contexts
from tests.serve.vllm_alora.kv.contexts import STEPS, Step, batch_of, threads_of

pytestmark = pytest.mark.slow

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def attention_of(first_rows: list[int], lengths: list[int]) -> NativeAttention:
    return NativeAttention.of(batch_of(first_rows, lengths), tuple(range(len(lengths))))


def assert_attention(
    step: Step, first_rows: list[int], lengths: list[int], tolerance: float = 0.0
) -> None:
    tolerance = tolerance or TOLERANCES[step.query.dtype]
    attention = attention_of(first_rows, lengths)
    contexts.assert_attention(attention, step, first_rows, lengths, tolerance)


@pytest.mark.parametrize(("first_rows", "lengths"), STEPS.values(), ids=STEPS)
@TYPES
def test_it_is_attention(first_rows: list[int], lengths: list[int], dtype: torch.dtype) -> None:
    assert_attention(Step.random(130, 70, dtype), first_rows, lengths)


@given(
    tokens=st.integers(1, 700),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    sharing=st.integers(1, 5),
    key_heads=st.integers(1, 3),
    size=st.sampled_from([64, 128, 192, 1024]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_of_every_size(
    tokens: int, lengths: list[int], sharing: int, key_heads: int, size: int, dtype: torch.dtype
) -> None:
    """Tokens that are no whole block or group, rows that are no whole tile."""
    heads = sharing * key_heads
    rows = sum(lengths) + 5
    step = Step.random(rows, tokens, dtype, heads=heads, key_heads=key_heads, size=size)
    first_rows = [5 + sum(lengths[:index]) for index in range(len(lengths))]
    assert_attention(step, first_rows, lengths)


@pytest.fixture(params=["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def lesser_machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: MonkeyPatch
) -> Iterator[None]:
    """A processor without these instructions."""
    monkeypatch.setenv("CXX", f"g++ {request.param}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.mark.usefixtures("lesser_machine")
@TYPES
def test_with_shorter_vectors_it_is_the_same(dtype: torch.dtype) -> None:
    first_rows, lengths = STEPS["several tiles"]
    assert_attention(Step.random(130, 333, dtype), first_rows, lengths)


@TYPES
def test_scores_may_be_large_and_far_apart(dtype: torch.dtype) -> None:
    """The largest may be in any block. Scores of hundreds are known to 1e-5."""
    step = Step.random(12, 600, dtype)
    step.query.mul_(30)
    assert_attention(step, [0, 3, 6, 9], [3] * 4, max(1e-4, TOLERANCES[dtype]))


@TYPES
@pytest.mark.parametrize("spoilt", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_one_request_s_nan_reaches_no_other(spoilt: str, number: float, dtype: torch.dtype) -> None:
    attention = attention_of([number * 3 for number in range(8)], [3] * 8)
    step = Step.random(24, 70, dtype)
    whole = step.attend(attention)
    getattr(step, spoilt)[9:12] = number
    attended = step.attend(attention)
    others = [*range(9), *range(12, 24)]
    assert torch.equal(attended[others], whole[others])
    if number != number:
        assert attended[9:12].isnan().all()


@TYPES
def test_a_context_s_nan_reaches_all_its_readers(dtype: torch.dtype) -> None:
    """And no verdict is made of it (guard/verdict.py)."""
    step = Step.random(6, 300, dtype)
    step.context[0][170, 0] = torch.nan
    attended = step.attend(attention_of([0, 3], [3, 3]))
    assert attended[:, :3].isnan().all() and attended[:, 3:].isfinite().all()


@TYPES
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    step = Step.random(130, 333, dtype)
    attention = attention_of(*STEPS["several tiles"])
    outputs = [step.attend(attention) for _ in threads_of(1, 2, 3)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_which_heads_it_takes(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert is_faster(torch.bfloat16, 64) and is_faster(torch.float32, 256)
    assert not is_faster(torch.float16, 64)
    assert not is_faster(torch.bfloat16, 80) and not is_faster(torch.bfloat16, 2048)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not is_faster(torch.bfloat16, 64)


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Memory that is not theirs would be read or written."""
    attention = attention_of([0, 3], [3, 3])
    cases: list[Step] = []
    for rows, size in ((5, 64), (6, 80)):  # too few rows, a size that is not taken
        cases.append(Step.random(rows, 70, torch.float32, size=size))
    short = Step.random(6, 70, torch.float32)
    short.context = (short.context[0], short.context[1][:60])
    mixed = Step.random(6, 70, torch.float32)
    mixed.key = mixed.key.bfloat16()
    odd = Step.random(6, 70, torch.float32, heads=5)
    for step in (*cases, short, mixed, odd):
        with pytest.raises(ValueError, match="no attention to a shared context"):
            step.attend(attention)
    step = Step.random(6, 70, torch.float32)
    scattered = torch.zeros(6, 64, 6).mT  # of an output that is copied nothing would be seen
    with pytest.raises(ValueError, match="no attention to a shared context"):
        attention.attend(step.query, step.key, step.value, step.context, 0.125, scattered)


@TYPES
def test_what_is_read_may_lie_otherwise(dtype: torch.dtype) -> None:
    step = Step.random(24, 70, dtype)
    step.value = torch.randn(24, 64, 2).to(dtype).mT
    step.context = (torch.randn(2, 70, 64).to(dtype).transpose(0, 1), step.context[1])
    assert_attention(step, [0, 3, 9], [3, 3, 3])


def test_a_longer_context_after_a_shorter_one() -> None:
    """What is kept for the context grows."""
    for tokens in (65, 3000, 70):
        assert_attention(Step.random(12, tokens, torch.float32), [0, 6], [3, 3])
