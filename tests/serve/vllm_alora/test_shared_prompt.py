"""A prompt that says what it shares is read like a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import vllm_alora
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState
from vllm_alora.shared_prompt import Prefix, SharedPrompt, prefix_of

from tests.serve.adapters import BASE


def test_it_is_the_prefix_and_the_suffix_as_an_array_too() -> None:
    prompt = SharedPrompt(Prefix([5, 6, 7]), [8, 9])
    assert [*prompt] == [5, 6, 7, 8, 9] and prompt == [5, 6, 7, 8, 9] and len(prompt) == 5
    assert np.array(prompt).dtype == np.int32 and np.array(prompt).tolist() == [*prompt]
    row = np.zeros(7, np.int64)
    row[1:6] = prompt
    assert row.tolist() == [0, 5, 6, 7, 8, 9, 0]


@given(
    shared=st.lists(st.integers(0, 9), max_size=6),
    own=st.lists(st.integers(0, 9), max_size=6),
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_it_is_read_like_a_list(
    shared: list[int], own: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    prompt, tokens = SharedPrompt(Prefix(shared), own), [*shared, *own]
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


pytestmark = pytest.mark.slow

BLOCK = 16
BLOCKS = 9  # one of them is vLLM's own
SHARED = [*range(10, 10 + BLOCK + 5)]  # a block and a part
REQUESTS, OWN_TOKENS, ANSWER_TOKENS = 3, BLOCK, 2 * BLOCK

vllm_alora.register()
kv_cache_utils.init_none_hash(sha256)

NewPrompt = Callable[[Prefix, list[int]], Sequence[int]]


def as_list(prefix: Prefix, suffix: list[int]) -> list[int]:
    return [*prefix.token_ids, *suffix]


def small_scheduler(*, is_runner_v2: bool) -> Scheduler:
    """vLLM's, with fewer blocks than its requests come to need."""
    config = EngineArgs(
        model=BASE,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=BLOCK * (BLOCKS - 1),
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
        async_scheduling=False,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = BLOCKS
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK)
    scheduler.use_v2_model_runner = is_runner_v2
    return scheduler


def plans_of(new_prompt: NewPrompt, *, is_runner_v2: bool) -> list[dict[str, Any]]:
    """What a runner reads of the scheduler's steps, with lists for prompts; in the end the tokens
    of each request.
    """
    scheduler = small_scheduler(is_runner_v2=is_runner_v2)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    hasher, prefix = kv_cache_utils.get_request_block_hasher(BLOCK, sha256), Prefix(SHARED)
    requests = []
    for number in range(REQUESTS):
        prompt: Any = new_prompt(prefix, [100 + number] * OWN_TOKENS)
        requests.append(Request(str(number), prompt, params, None, block_hasher=hasher))
        scheduler.add_request(requests[-1])
    plans: list[dict[str, Any]] = []
    while scheduler.has_unfinished_requests():
        planned = scheduler.schedule()
        new = []
        for fresh in planned.scheduled_new_reqs:
            prompts = [fresh.prompt_token_ids, fresh.prefill_token_ids]
            tokens = [prompt and [*prompt] for prompt in prompts]
            new.append((fresh.req_id, tokens, fresh.block_ids, fresh.num_computed_tokens))
        scheduled, cached = planned.num_scheduled_tokens, vars(planned.scheduled_cached_reqs)
        preempted = planned.preempted_req_ids or set()
        plans.append({"new": new, "of": scheduled, "preempted": preempted, "cached": cached})
        sampled = []
        for request_id in scheduled:
            request = scheduler.requests[request_id]
            is_complete = request.num_computed_tokens == request.num_tokens
            sampled.append([request.num_tokens] * is_complete)
        rows = {request_id: row for row, request_id in enumerate(scheduled)}
        scheduler.update_from_output(planned, ModelRunnerOutput([*rows], rows, sampled))
    return [*plans, {request.request_id: [*request.all_token_ids] for request in requests}]


@pytest.mark.parametrize("is_runner_v2", [False, True])
def test_one_that_is_preempted_and_resumed_goes_on_as_a_list_does(*, is_runner_v2: bool) -> None:
    *plans, token_ids = plans_of(SharedPrompt, is_runner_v2=is_runner_v2)
    assert any(plan["preempted"] for plan in plans)
    assert [*plans, token_ids] == plans_of(as_list, is_runner_v2=is_runner_v2)
    prompt = as_list(Prefix(SHARED), [100] * OWN_TOKENS)
    assert token_ids["0"] == [*prompt, *range(len(prompt), len(prompt) + ANSWER_TOKENS)]


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
    grown = SharedPrompt(Prefix(SHARED), suffix).copy()
    grown.append(5)
    tokens = [*SHARED, *suffix, 5]
    assert staged(grown) == staged(tokens) == (tokens, tokens)
