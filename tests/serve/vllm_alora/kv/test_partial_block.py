"""Partial blocks are computed once, and nobody's answer changes: toys, then vLLM against PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.v1.request import RequestStatus
from vllm_alora.handover import ActivatedRequest
from vllm_alora.kv.partial_block import Copies, SharedPartialBlocks
from vllm_alora.kv.partial_block_seams import KEPT_PARTIAL_BLOCKS

from tests.serve.served import BLOCK, Served
from tests.serve.vllm_alora.checked_engine import CheckedEngine, steps_of, text_ids

pytestmark = pytest.mark.slow

KEPT = 4  # partial blocks
BLOCKS = SimpleNamespace(blocks=([SimpleNamespace(block_id=number) for number in (17, 18, 19)],))


def request(name: str) -> Any:
    """A stand-in for an aLoRA's request: a block and 9 tokens that all share, 20 of its own."""
    return SimpleNamespace(
        request_id=name,
        lora_request=ActivatedRequest(name, 1, f"/{name}", activation_start=BLOCK + 9),
        prompt_token_ids=list(range(BLOCK + 29)),
        block_hashes=["of the block"],
        cache_salt=None,
        mm_features=[],
        num_computed_tokens=0,
        status=RequestStatus.WAITING,
        computed_after_step=0,
        tokens_in_step=0,
    )


class Sharing(SharedPartialBlocks):
    """The scheduler's half, over a cache in which every request has the blocks 7, 8 and 9."""

    def __init__(self, *, in_step_above: int | None = None) -> None:
        cache = SimpleNamespace(get_block_ids=lambda _: ([7, 8, 9],))
        super().__init__(cache, BLOCK, KEPT, in_step_above=in_step_above)

    def found(self, one: Any, cached: int = BLOCK) -> int | None:
        """The tokens that the request begins with behind the cached ones; None: it waits."""
        tokens, is_async = self.get_num_new_matched_tokens(one, cached)
        assert not is_async
        return tokens

    def admit(self, one: Any, tokens: int = 0) -> None:
        self.update_state_after_alloc(one, BLOCKS, tokens)

    def step(self, **scheduled: int) -> Copies:
        return self.build_connector_meta(SimpleNamespace(num_scheduled_tokens=scheduled))


def scheduled(one: Any, through: int, computed: int = 0) -> Any:
    """The request, when a step is planned that computes it that far."""
    one.num_computed_tokens = computed
    one.status, one.computed_after_step = RequestStatus.RUNNING, through
    one.tokens_in_step = through - computed
    return one


def test_those_that_come_in_the_step_that_completes_a_partial_block_need_not_wait() -> None:
    """If it is larger than every captured graph."""
    shared, first, second = Sharing(in_step_above=BLOCK + 8), request("first"), request("second")
    shared.admit(first)
    for status, through in (
        (RequestStatus.RUNNING, BLOCK + 8),
        (RequestStatus.PREEMPTED, BLOCK + 29),
    ):
        first.status, first.computed_after_step = status, through
        assert shared.found(second) is None
    scheduled(first, BLOCK + 9, computed=1)
    assert shared.found(second) is None
    scheduled(first, BLOCK + 9)
    assert shared.found(second, 0) is None  # its conversation is not cached
    assert shared.found(second) == 9
    shared.admit(second, 9)
    with pytest.raises(RuntimeError, match="1 partial blocks are used"):  # not completed
        shared.step(first=BLOCK)


def test_a_preempted_request_computes_its_partial_block_when_it_comes_back() -> None:
    """And who waits for it has no adapter read before its own."""
    shared, leader, follower = Sharing(), request("leader"), request("follower")
    asked: list[str] = []

    def is_ready(lora_request: Any) -> bool:
        asked.append(lora_request.lora_name)
        return True

    shared.prefetch = SimpleNamespace(is_ready=is_ready, begin_step=int)  # type: ignore[assignment]
    shared.admit(scheduled(leader, 7))
    shared.step(leader=7)
    assert shared.found(follower) is None
    assert asked == ["follower"]  # it is read while the leader computes
    leader.status = RequestStatus.PREEMPTED
    leader.num_computed_tokens = 0
    assert shared.found(follower) is None
    assert shared.found(leader, 0) == 0
    assert asked == ["follower", "leader"]
    shared.admit(leader)
    assert shared.step(leader=60) == Copies(saves={0: 8})


@pytest.fixture(scope="module")
def small_engine() -> Iterator[Served]:
    """An engine that keeps four partial blocks and has room for two of the longest prompts."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    kept = {KEPT_PARTIAL_BLOCKS: KEPT}
    with Served.start(additional_config=kept, num_gpu_blocks_override=17, **settings) as engine:
        yield engine


@pytest.fixture
def small(small_engine: Served, adapters: dict[str, str]) -> CheckedEngine:
    small_engine.reset()
    return CheckedEngine(small_engine, adapters)


def fill(small: CheckedEngine) -> None:
    """Use all blocks, for no partial one."""
    small.ask_each([text_ids(6 * BLOCK, seed) for seed in range(4)], [None] * 4)


@pytest.mark.parametrize("before", [3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 4 * BLOCK - 1])
def test_a_second_adapter_computes_only_its_suffix(checked: CheckedEngine, before: int) -> None:
    prompts = [checked.prompt(before, after, seed=21) for after in (9, 40)]
    assert checked.ask(prompts, ["first", "second"]) == [0, before]


@pytest.mark.parametrize("tokens", [1, 7, BLOCK, 40, 45])
def test_others_wait_however_prefill_is_cut(checked: CheckedEngine, tokens: int) -> None:
    prompts = [checked.prompt(BLOCK + 13, after, seed=22) for after in (5, 30, 12)]
    checked.served.limit_step(tokens)
    cached = checked.ask(prompts, ["first", "second", "second"])
    assert cached == [0, BLOCK + 13, BLOCK + 13]


@pytest.mark.parametrize(
    ("before", "known"), [(76, 10), (95, 29), (96, 9), (97, 9), (3 * BLOCK + 7, BLOCK + 5)]
)
def test_one_that_goes_on_computes_more(checked: CheckedEngine, before: int, known: int) -> None:
    """The second prompt goes on from the first's conversation; the third has its last two tokens
    changed, as a reply that streams. What of the third is `known` beyond two blocks: all but these
    two, unless they change a block that was full.
    """
    conversation, end = text_ids(before, seed=24), [*checked.invocation, *text_ids(9, 25)]
    first, changed = conversation[: 2 * BLOCK + 9], [*conversation[:-2], *text_ids(2, 26)]
    prompts = [[*each, *end] for each in (first, conversation, changed)]
    cached = checked.ask_each(prompts, ["first", "second", "first"])
    assert cached == [0, 2 * BLOCK + 9, 2 * BLOCK + known]


def test_one_that_goes_on_is_shared_in_the_step_that_computes_it(checked: CheckedEngine) -> None:
    """The first copies the kept partial block, computes the rest, and the second has both."""
    conversation, end = text_ids(2 * BLOCK + 20, seed=27), [*checked.invocation, *text_ids(9, 28)]
    checked.ask([[*conversation[: 2 * BLOCK + 9], *end]], ["first"])
    cached = checked.ask([[*conversation, *end]] * 2, ["first", "second"])
    assert cached == [2 * BLOCK + 9, 2 * BLOCK + 20]


def test_other_conversations_and_adapters_share_no_partial_blocks(checked: CheckedEngine) -> None:
    """Neither conversations that begin alike nor those that end alike; nor the base and LoRAs."""
    blocks, end = text_ids(2 * BLOCK, seed=30), [*checked.invocation, *text_ids(6, 33)]
    prompts = [[*blocks, *text_ids(11, seed), *end] for seed in (31, 32, 31, 32)]
    cached = checked.ask(prompts, ["first", "first", "second", "second"])
    assert cached == [0, 2 * BLOCK, 2 * BLOCK + 11, 2 * BLOCK + 11]
    prompts = [[*text_ids(2 * BLOCK, seed), *text_ids(11, 41), *end] for seed in (43, 44)]
    checked.ask(prompts, [None, None])
    assert checked.ask_each(prompts, ["first", "second"]) == [2 * BLOCK, 2 * BLOCK]
    prompts = [checked.prompt(BLOCK + 9, seed=60)] * 4
    assert checked.ask(prompts, ["first", None, "lora", "second"]) == [0, BLOCK, 0, BLOCK + 9]


def test_the_least_recently_used_partial_block_makes_room(small: CheckedEngine) -> None:
    prompts = [small.prompt(BLOCK + 9, seed=50 + number) for number in range(KEPT + 1)]
    asked = [*prompts[:KEPT], prompts[0], prompts[KEPT]]  # 0 is used again, so 1 goes
    small.ask_each(asked, ["first"] * len(asked))
    cached = small.ask_each([prompts[number] for number in (0, KEPT, 1)], ["second"] * 3)
    assert cached == [BLOCK + 9, BLOCK + 9, BLOCK]


def test_one_who_finds_its_own_last_block_in_the_cache_shares_what_it_begins_with(
    small: CheckedEngine, monkeypatch: MonkeyPatch
) -> None:
    """The partial block is not kept any more, the whole block that begins with it is."""
    fill(small)  # so that no block is empty
    prompt = small.prompt(BLOCK - 2, seed=62)
    small.ask([prompt], ["first"])
    others = [small.prompt(9, seed=63 + number) for number in range(KEPT)]
    small.ask_each(others, ["second"] * KEPT)  # which is read by then, and need not wait
    planned = steps_of(small.served, monkeypatch)
    assert small.ask([prompt, prompt], ["first", "second"]) == [BLOCK, BLOCK - 2]
    (share,) = planned[0].shares
    assert (share.start, share.stop) == (BLOCK - 2, BLOCK - 2)


def test_a_cancelled_request_s_partial_block_is_the_next_one_s(checked: CheckedEngine) -> None:
    engine = checked.served.llm.llm_engine
    prompt = checked.prompt(BLOCK + 9, seed=70)
    checked.served.limit_step(7)
    params = SamplingParams(max_tokens=1, detokenize=False)
    for kind in ("first", "second"):
        lora, inputs = checked.served.request(checked.folder(kind)), {"prompt_token_ids": prompt}
        engine.add_request(kind, inputs, params, lora_request=lora)
    engine.step()
    engine.abort_request(["first"])
    outputs = [output for _ in range(20) for output in engine.step()]
    engine.abort_request(["second"])  # were it waiting for ever, the session's engine would too
    assert [output.request_id for output in outputs if output.finished] == ["second"]
    assert checked.ask([prompt], ["second"]) == [BLOCK + 9]


def test_a_partial_block_goes_with_its_conversation_and_the_prefix_cache(
    small: CheckedEngine,
) -> None:
    prompt = small.prompt(BLOCK + 9, 20, seed=75)
    small.ask([prompt], ["first"])
    fill(small)
    assert small.ask([prompt], ["second"]) == [0]
    prompt = small.prompt(9, seed=80)  # without a whole block, which would be missed too
    assert small.ask_each([prompt] * 2, ["first", "second"]) == [0, 9]
    assert small.served.llm.reset_prefix_cache()
    assert small.ask([prompt], ["second"]) == [0]


def test_with_too_few_blocks_nobody_waits_for_ever(small: CheckedEngine) -> None:
    prompts = []
    for number in range(12):
        prompts.append(small.prompt(3 * BLOCK + 9, 20 + number, seed=90 + number % 3))
    small.ask(prompts, ["first", "second"] * 6)
