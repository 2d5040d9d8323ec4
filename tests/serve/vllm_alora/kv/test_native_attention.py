"""Attention to a shared context in C++ is attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm_alora.compiler import compiled
from vllm_alora.kv.native_attention import NativeAttention
from vllm_alora.kv.shared_context import Batch

pytestmark = pytest.mark.slow

HEADS, KEY_HEADS, SIZE = 6, 2, 64


@dataclass(frozen=True)
class Requests:
    """Where requests begin in a step, and how many rows they have."""

    first_rows: Sequence[int]
    lengths: Sequence[int]

    @classmethod
    def side_by_side(cls, count: int, rows: int) -> Requests:
        return cls([number * rows for number in range(count)], [rows] * count)

    @property
    def batch(self) -> Batch:
        """As vLLM's runner has them."""
        count, first_rows = len(self.lengths), np.array(self.first_rows)

        class BatchOfRows(Batch):
            @property
            def first_rows(self) -> Any:
                return first_rows

        blocks, zeros = np.zeros((count, 8), np.int32), np.zeros(count)
        return BatchOfRows(blocks, zeros[:, None], zeros, np.array(self.lengths), zeros, 32)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(range(len(self.lengths)))


@dataclass
class Step:
    """Random tensors of a step's rows, and of a context that some of them share."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def random(
        cls,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        heads: int = HEADS,
        key_heads: int = KEY_HEADS,
        size: int = SIZE,
    ) -> Step:
        torch.manual_seed(tokens)
        # As vLLM's layers give them: parts of one product.
        parts = torch.randn(rows, heads + 2 * key_heads, size).to(dtype)
        query, key, value = parts.split([heads, key_heads, key_heads], dim=1)
        context = torch.randn(2, tokens, key_heads, size).to(dtype)
        return cls(query, key, value, (context[0], context[1]))

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def attend(self, attention: Any) -> torch.Tensor:
        """What the rows of the attention attend to; minus one in all other rows."""
        rows, *shape = self.query.shape
        output = torch.full((rows + 3, *shape), -1.0, dtype=self.query.dtype)  # vLLM's is padded
        attention.attend(self.query, self.key, self.value, self.context, self.scale, output)
        assert (output[rows:] == -1).all()
        return output[:rows]

    def plainly(self, requests: Requests) -> torch.Tensor:
        """The same by plain softmaxes in float64."""
        output = torch.full(self.query.shape, -1.0, dtype=torch.float64)
        sharing = self.query.shape[1] // self.key.shape[1]
        for first, length in zip(requests.first_rows, requests.lengths, strict=True):
            own = slice(first, first + length)
            keys = torch.cat([self.context[0], self.key[own]]).double()
            values = torch.cat([self.context[1], self.value[own]]).double()
            query = (self.query[own].double() * self.scale).unflatten(1, (-1, sharing))
            scores = torch.einsum("lhsd,thd->hslt", query, keys)
            is_later = torch.ones(length, len(keys)).triu(len(keys) - length + 1).bool()
            weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
            output[own] = torch.einsum("hslt,thd->lhsd", weights, values).flatten(1, 2)
        return output


TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
SEVERAL_TILES = Requests.side_by_side(40, 3)
TWO = Requests.side_by_side(2, 3)


def attention_of(requests: Requests) -> NativeAttention:
    return NativeAttention.of(requests.batch, requests.numbers)


def assert_attention(step: Step, requests: Requests, *, tolerance: float = 0.0) -> None:
    """Of the requests' rows, and nothing of others is written."""
    tolerance = tolerance or TOLERANCES[step.query.dtype]
    attended = step.attend(attention_of(requests))
    expected = step.plainly(requests)
    torch.testing.assert_close(attended.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "requests",
    [
        Requests([2, 5, 8, 11], [3] * 4),
        Requests([9, 0, 20], [4, 1, 7]),  # apart, of several lengths
        SEVERAL_TILES,
        Requests([0, 60], [60, 60]),  # longer than a tile
    ],
    ids=str,
)
@TYPES
def test_it_is_attention(requests: Requests, dtype: torch.dtype) -> None:
    assert_attention(Step.random(130, 70, dtype), requests)


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
    assert_attention(step, Requests(first_rows, lengths))


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
def test_with_shorter_vectors_it_is_the_same() -> None:
    for dtype in TOLERANCES:
        assert_attention(Step.random(130, 333, dtype), SEVERAL_TILES)


@TYPES
def test_scores_may_be_large_and_far_apart(dtype: torch.dtype) -> None:
    """The largest may be in any block. Scores of hundreds are known to 1e-5."""
    step = Step.random(12, 600, dtype)
    step.query.mul_(30)
    tolerance = max(1e-4, TOLERANCES[dtype])
    assert_attention(step, Requests.side_by_side(4, 3), tolerance=tolerance)


@TYPES
@pytest.mark.parametrize("spoilt", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_one_request_s_nan_reaches_no_other(spoilt: str, number: float, dtype: torch.dtype) -> None:
    attention = attention_of(Requests.side_by_side(8, 3))
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
    attended = step.attend(attention_of(TWO))
    assert attended[:, :3].isnan().all() and attended[:, 3:].isfinite().all()


@TYPES
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype, threads: list[int]) -> None:
    step = Step.random(130, 333, dtype)
    outputs = []
    for count in threads:
        torch.set_num_threads(count)
        outputs.append(step.attend(attention_of(SEVERAL_TILES)))
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Memory that is not theirs would be read or written."""
    attention = attention_of(TWO)
    fitting = Step.random(6, 70, torch.float32)
    scattered = torch.zeros(6, 64, 6).mT  # of an output that is copied nothing would be seen
    for step, output in (
        (Step.random(5, 70, torch.float32), None),
        (Step.random(6, 70, torch.float32, size=80), None),
        (Step.random(6, 70, torch.float32, heads=5), None),
        (replace(fitting, context=(fitting.context[0], fitting.context[1][:60])), None),
        (replace(fitting, key=fitting.key.bfloat16()), None),
        (fitting, scattered),
    ):
        output = torch.zeros_like(step.query) if output is None else output
        with pytest.raises(ValueError, match="no attention to a shared context"):
            attention.attend(step.query, step.key, step.value, step.context, 0.125, output)


@TYPES
def test_what_is_read_may_lie_otherwise(dtype: torch.dtype) -> None:
    step = Step.random(24, 70, dtype)
    step.value = torch.randn(24, 64, 2).to(dtype).mT
    step.context = (torch.randn(2, 70, 64).to(dtype).transpose(0, 1), step.context[1])
    assert_attention(step, Requests([0, 3, 9], [3] * 3))
