"""A prompt that says what it shares is read like a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.v1.request import Request
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState
from vllm_alora.shared_prompt import Prefix, SharedPrompt, prefix_of

from tests.serve.served import BLOCK, Served
from tests.serve.vllm_alora.checked_engine import text_ids

pytestmark = pytest.mark.slow


@given(
    shared=st.lists(st.integers(0, 9), max_size=6),
    own=st.lists(st.integers(0, 9), max_size=6),
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_it_is_read_like_a_list_and_like_an_array(
    shared: list[int], own: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    prompt, tokens = SharedPrompt(Prefix(shared), own), [*shared, *own]
    assert [*prompt] == tokens and prompt == tokens and len(prompt) == len(tokens)
    assert np.array(prompt).dtype == np.int32 and np.array(prompt).tolist() == tokens
    assert prompt[start:stop:step] == tokens[start:stop:step]
    for index in range(-len(tokens), len(tokens)):
        assert prompt[index] == tokens[index]
    for outside in (len(tokens), -len(tokens) - 1):
        with pytest.raises(IndexError):
            prompt[outside]


def test_a_copy_grows_by_itself_and_shares_the_prefix() -> None:
    prompt = SharedPrompt(Prefix([5]), [6])
    grown = prompt.copy()
    grown.append(7)
    grown.extend([8, 9])
    assert grown == [5, 6, 7, 8, 9] and prompt == [5, 6]
    assert len(grown) == 5 and len(prompt) == 2
    # By identity: an equal prefix is another one.
    assert prefix_of(grown) is prefix_of(prompt) is prompt.prefix
    assert prefix_of([5, 6, 7]) is None and prefix_of(None) is None


def answered(served: Served, *, is_shared: bool) -> list[list[int]]:
    """The tokens of three prompts that begin alike, and of their answers."""
    params = SamplingParams(max_tokens=BLOCK, temperature=0.0, ignore_eos=True, detokenize=False)
    prefix, requests = Prefix(text_ids(BLOCK + 5, seed=1)), []
    for number in range(3):
        prompt: Any = SharedPrompt(prefix, text_ids(2 * BLOCK, seed=2 + number))
        if not is_shared:
            prompt = [*prompt]
        hasher = served.core.request_block_hasher
        requests.append(Request(str(number), prompt, params, None, block_hasher=hasher))
        served.core.add_request(requests[-1])
    while served.scheduler.has_unfinished_requests():
        served.core.step_fn()
    assert any(request.num_preemptions for request in requests)
    return [[*request.all_token_ids] for request in requests]


def test_one_that_is_preempted_and_resumed_goes_on_as_a_list_does(served: Served) -> None:
    """With fewer blocks than the requests come to need: one more each for their answers."""
    pool = served.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - (1 + 3 * 3 + 1))
    try:
        assert answered(served, is_shared=True) == answered(served, is_shared=False)
    finally:
        pool.free_blocks(taken)


def staged(tokens: Any) -> tuple[list[int], list[int]]:
    """What runner V2 is about to write of them, from a list or not: a tensor, and a request."""
    device = torch.device("cpu")
    tensor = StagedWriteTensor((2, 64), torch.int32, device)
    tensor.stage_write(1, 3, tokens)
    states = RequestState(2, 64, 64, 0, 100, device)
    states.add_request("one", len(tokens) - 1, tokens, 0, 1)
    assert states.prefill_len.np.max() == len(tokens)
    return tensor._staged_write_contents, states.all_token_ids._staged_write_contents


@pytest.mark.parametrize("suffix", [[], [7], [7, 8, 9]])
def test_runner_v2_writes_it_like_a_list(suffix: list[int], monkeypatch: MonkeyPatch) -> None:
    # Its buffers are views of pinned memory otherwise, which needs a GPU.
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    grown = SharedPrompt(Prefix([5, 6]), suffix).copy()
    grown.append(5)
    tokens = [5, 6, *suffix, 5]
    assert staged(grown) == staged(tokens) == (tokens, tokens)
