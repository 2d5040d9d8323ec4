"""Partial blocks are computed once, and nobody's answer changes: real vLLM with the connector,
random adapters and prompts, against PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import RequestStatus
from vllm_alora.activation import ActivatedRequest
from vllm_alora.adapter import read_adapter
from vllm_alora.kv.partial_block import Copies, Share, SharedPartialBlocks
from vllm_alora.kv.partial_block_seams import KEPT_PARTIAL_BLOCKS

from tests.serve.served import BLOCK, Answer, Served
from tests.serve.vllm_alora.test_parity import assert_peft, prompt_for, text_ids

pytestmark = pytest.mark.slow

KEPT = 4  # partial blocks


def request(name: str, *, before: int = BLOCK + 9, salt: str | None = None) -> Any:
    """A stand-in for the scheduler's request of an aLoRA: `before` tokens of conversation, the same
    for all, then 20 of its own.
    """
    lora = ActivatedRequest(name, 1, f"/{name}", activation_start=before)
    hashes = [(salt, number) for number in range(before // BLOCK)]
    return SimpleNamespace(
        request_id=name,
        lora_request=lora,
        prompt_token_ids=list(range(before + 20)),
        block_hashes=hashes,
        cache_salt=salt,
        mm_features=[],
        num_computed_tokens=0,
        status=RequestStatus.WAITING,
        computed_after_step=0,
        tokens_in_step=0,
    )


def sharing(room: int = KEPT, *, in_step_above: int | None = None) -> SharedPartialBlocks:
    """The scheduler's half, over a cache in which every request has the blocks 7, 8 and 9."""
    return SharedPartialBlocks(
        SimpleNamespace(get_block_ids=lambda _: ([7, 8, 9],)),
        BLOCK,
        room,
        in_step_above=in_step_above,
    )


def scheduled(one: Any, through: int) -> Any:
    """The request, when a step is planned that computes it that far."""
    one.status, one.computed_after_step = RequestStatus.RUNNING, through
    one.tokens_in_step = through - one.num_computed_tokens
    return one


BLOCKS = SimpleNamespace(blocks=([SimpleNamespace(block_id=number) for number in (17, 18, 19)],))


def step(shared: SharedPartialBlocks, **scheduled: int) -> Copies:
    return shared.build_connector_meta(SimpleNamespace(num_scheduled_tokens=scheduled))


def test_the_first_computes_the_others_wait_and_then_copy() -> None:
    shared, first, second = sharing(), request("first"), request("second")
    assert shared.get_num_new_matched_tokens(first, 0) == (0, False)
    shared.update_state_after_alloc(first, BLOCKS, 0)
    assert step(shared, first=BLOCK + 8) == Copies()
    assert shared.get_num_new_matched_tokens(second, BLOCK) == (None, False)
    first.num_computed_tokens = BLOCK + 8
    assert step(shared, first=1) == Copies(saves={0: 8})
    assert shared.get_num_new_matched_tokens(second, 0) == (
        0,
        False,
    )  # the conversation is not cached
    assert shared.get_num_new_matched_tokens(second, BLOCK) == (9, False)
    shared.update_state_after_alloc(second, BLOCKS, 9)
    assert step(shared) == Copies(loads={0: [18]})
    assert step(shared) == Copies()


def test_the_adapter_of_a_request_is_read_from_the_moment_it_comes() -> None:
    shared, asked = sharing(), []
    shared.on_new_request(request("nobody reads ahead"))
    shared.prefetch = SimpleNamespace(is_ready=asked.append)  # type: ignore[assignment]
    shared.on_new_request(first := request("first"))
    shared.on_new_request(SimpleNamespace(lora_request=None))
    assert asked == [first.lora_request]


def test_those_that_come_in_the_step_that_completes_a_partial_block_need_not_wait() -> None:
    shared, first, second = sharing(in_step_above=0), request("first"), request("second")
    shared.update_state_after_alloc(first, BLOCKS, 0)
    for status, through in (
        (RequestStatus.RUNNING, BLOCK + 8),
        (RequestStatus.PREEMPTED, BLOCK + 29),
    ):
        first.status, first.computed_after_step = status, through
        assert shared.get_num_new_matched_tokens(second, BLOCK) == (None, False)
    scheduled(first, BLOCK + 9)
    assert shared.get_num_new_matched_tokens(second, 0) == (
        None,
        False,
    )  # its conversation is not cached
    assert shared.get_num_new_matched_tokens(second, BLOCK) == (9, False)
    shared.update_state_after_alloc(second, BLOCKS, 9)
    assert step(shared, first=BLOCK + 9) == Copies(saves={0: 8}, shares=[Share(8, 0, 9, (18,))])
    assert step(shared) == Copies()


@pytest.mark.parametrize("computed_before", [0, BLOCK + 4])
def test_a_step_that_a_captured_graph_may_compute_shares_nothing(computed_before: int) -> None:
    """What counts are the leader's tokens in this step, not those before it."""
    first, second = request("first"), request("second")
    first.num_computed_tokens = computed_before
    tokens = BLOCK + 29 - computed_before
    scheduled(first, BLOCK + 29)
    for largest_graph, shared_tokens in ((tokens, None), (tokens - 1, 9), (None, None)):
        shared = sharing(in_step_above=largest_graph)
        shared.update_state_after_alloc(first, BLOCKS, 0)
        assert shared.get_num_new_matched_tokens(second, BLOCK) == (shared_tokens, False)


@pytest.mark.parametrize(("computed_before", "start"), [(BLOCK + 4, 4), (BLOCK + 20, 9)])
def test_of_a_partial_block_that_was_begun_before_the_step_the_beginning_is_copied(
    computed_before: int, start: int
) -> None:
    """All of it, where the first has found more than the partial block in the cache."""
    shared, first, second = (
        sharing(in_step_above=0),
        scheduled(request("first"), BLOCK + 29),
        request("second"),
    )
    first.num_computed_tokens = computed_before
    shared.update_state_after_alloc(first, BLOCKS, 0)
    assert shared.get_num_new_matched_tokens(second, BLOCK) == (9, False)
    shared.update_state_after_alloc(second, BLOCKS, 9)
    copies = step(shared, first=BLOCK + 29 - computed_before)
    assert copies.shares == [Share(8, start, 9, (18,))]


def test_who_joins_one_that_found_more_than_its_partial_block_in_the_cache_gets_all_of_it() -> None:
    shared, first = sharing(in_step_above=0), scheduled(request("first"), BLOCK + 29)
    first.num_computed_tokens, first.tokens_in_step = BLOCK + 20, 9
    shared.update_state_after_alloc(first, BLOCKS, 0)
    copies = step(shared, first=9)
    first.num_computed_tokens = BLOCK + 29  # the step is planned
    assert shared.can_join(first, copies)
    shared.join(first, [18], copies)
    assert copies.shares == [Share(8, 9, 9, (18,))]


def test_a_step_that_does_not_complete_a_partial_block_that_it_uses_fails() -> None:
    shared, first, second = (
        sharing(in_step_above=0),
        scheduled(request("first"), BLOCK + 29),
        request("second"),
    )
    shared.update_state_after_alloc(first, BLOCKS, 0)
    shared.get_num_new_matched_tokens(second, BLOCK)
    shared.update_state_after_alloc(second, BLOCKS, 9)
    with pytest.raises(RuntimeError, match="1 partial blocks are used"):
        step(shared, first=BLOCK)


def test_a_preempted_request_computes_its_partial_block_when_it_comes_back() -> None:
    shared, first = sharing(), request("first")
    shared.update_state_after_alloc(first, BLOCKS, 0)
    step(shared, first=7)
    assert shared.get_num_new_matched_tokens(first, 0) == (0, False)
    shared.update_state_after_alloc(first, BLOCKS, 0)
    assert step(shared, first=60) == Copies(saves={0: 8})


def test_who_waits_for_a_preempted_request_has_no_adapter_read_before_its_own() -> None:
    shared, leader, follower = sharing(), request("leader"), request("follower")
    asked: list[str] = []

    def is_ready(lora_request: Any) -> bool:
        asked.append(lora_request.lora_name)
        return True

    shared.prefetch = SimpleNamespace(is_ready=is_ready)  # type: ignore[assignment]
    shared.update_state_after_alloc(scheduled(leader, 7), BLOCKS, 0)
    assert shared.get_num_new_matched_tokens(follower, BLOCK) == (None, False)
    assert asked == ["follower"]  # it is read while the leader computes
    leader.status = RequestStatus.PREEMPTED
    assert shared.get_num_new_matched_tokens(follower, BLOCK) == (None, False)
    assert shared.get_num_new_matched_tokens(leader, 0) == (0, False)
    assert asked == ["follower", "leader"]


def test_a_conversation_that_has_grown_begins_with_the_partial_block_it_had() -> None:
    """Within its block, into the next ones, and only where it goes on as it was."""
    shared = sharing()
    shared.update_state_after_alloc(request("first"), BLOCKS, 0)
    step(shared, first=60)
    within, beyond, other = (
        request("within", before=BLOCK + 12),
        request("beyond", before=2 * BLOCK + 3),
        request("other", before=BLOCK + 9),
    )
    other.prompt_token_ids[BLOCK + 4] = -1
    for grown, tokens in ((within, 9), (beyond, 9), (other, 4)):
        assert shared.get_num_new_matched_tokens(grown, BLOCK) == (tokens, False)
        shared.update_state_after_alloc(grown, BLOCKS, tokens)
    assert shared.get_num_new_matched_tokens(request("as within", before=BLOCK + 12), BLOCK) == (
        None,
        False,
    )  # it waits for the rest
    assert step(shared, within=60, beyond=90, other=60) == Copies(
        loads={0: [18, 18, 18]}, saves={1: 8, 2: 9, 3: 8}
    )
    assert shared.get_num_new_matched_tokens(request("as within", before=BLOCK + 12), BLOCK) == (
        12,
        False,
    )


def test_of_two_partial_blocks_in_the_only_slot_the_later_is_kept() -> None:
    shared, first, second = sharing(room=1), request("first"), request("second", salt="other")
    for one in (first, second):
        shared.update_state_after_alloc(one, BLOCKS, 0)
    assert step(shared, first=60, second=60) == Copies(saves={0: 8})
    assert shared.get_num_new_matched_tokens(first, BLOCK) == (0, False)
    assert shared.get_num_new_matched_tokens(second, BLOCK) == (9, False)


@pytest.mark.parametrize("before", [9, BLOCK + 9])
def test_another_salt_is_another_partial_block(before: int) -> None:
    shared = sharing()
    shared.update_state_after_alloc(request("first", before=before, salt="one"), BLOCKS, 0)
    step(shared, first=60)
    assert shared.get_num_new_matched_tokens(
        request("other", before=before, salt="one"), before // BLOCK * BLOCK
    ) == (9, False)
    assert shared.get_num_new_matched_tokens(
        request("other", before=before, salt="two"), before // BLOCK * BLOCK
    ) == (0, False)


@pytest.fixture(scope="module")
def small_engine() -> Iterator[Served]:
    """An engine that keeps four partial blocks and has room for two of the longest prompts."""
    settings = {
        "num_gpu_blocks_override": 17,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    engine = Served.start(additional_config={KEPT_PARTIAL_BLOCKS: KEPT}, **settings)
    yield engine
    engine.close()


@pytest.fixture
def small(small_engine: Served) -> Served:
    small_engine.reset()
    return small_engine


@pytest.fixture
def invocation(adapters: dict[str, str]) -> tuple[int, ...]:
    return read_adapter(adapters["first"]).invocation


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


@pytest.mark.parametrize("before", [3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 4 * BLOCK - 1])
def test_a_second_adapter_computes_only_its_suffix(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...], before: int
) -> None:
    prompts = [prompt_for(invocation, before=before, after=after, seed=21) for after in (9, 40)]
    folders = [adapters["first"], adapters["second"]]
    answers = served.ask(prompts, folders)
    assert cached(answers) == [0, before]
    assert_peft(answers, prompts, folders)


def test_a_conversation_and_all_that_is_asked_about_it_are_one_step(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    engine, prompts = (
        served.llm.llm_engine,
        [
            prompt_for(invocation, before=2 * BLOCK + 13, after=after, seed=23)
            for after in (5, 30, 12)
        ],
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(
            str(number),
            {"prompt_token_ids": prompt},
            params,
            lora_request=served.request(adapters["first"]),
        )
    assert [output.finished for output in engine.step()] == [True] * 3


@pytest.mark.parametrize("tokens", [1, 7, BLOCK, 40, 45])
def test_others_wait_for_a_partial_block_however_prefill_is_cut(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...], tokens: int
) -> None:
    prompts = [
        prompt_for(invocation, before=BLOCK + 13, after=after, seed=22) for after in (5, 30, 12)
    ]
    folders = [adapters["first"], adapters["second"], adapters["second"]]
    served.limit_step(tokens)
    answers = served.ask(prompts, folders)
    assert cached(answers) == [0, BLOCK + 13, BLOCK + 13]
    assert_peft(answers, prompts, folders)


@pytest.mark.parametrize(
    ("before", "known"),
    [
        (2 * BLOCK + 12, 10),
        (3 * BLOCK - 1, 29),
        (3 * BLOCK, 9),
        (3 * BLOCK + 1, 9),
        (3 * BLOCK + 7, BLOCK + 5),
    ],
)
def test_a_conversation_that_goes_on_computes_what_is_new(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...], before: int, known: int
) -> None:
    """The second prompt goes on from the first's conversation; the third has its last two tokens
    changed, as a reply that streams.

    What of the third is `known` beyond two blocks: all but these two, unless they change a block
    that was full.
    """
    conversation, end = text_ids(before, seed=24), [*invocation, *text_ids(9, 25)]
    first, changed = conversation[: 2 * BLOCK + 9], [*conversation[:-2], *text_ids(2, 26)]
    prompts = [[*each, *end] for each in (first, conversation, changed)]
    folders = [adapters[kind] for kind in ("first", "second", "first")]
    answers = [
        served.ask_one(prompt, folder) for prompt, folder in zip(prompts, folders, strict=True)
    ]
    assert cached(answers) == [0, 2 * BLOCK + 9, 2 * BLOCK + known]
    assert_peft(answers, prompts, folders)


def test_a_conversation_that_goes_on_is_shared_in_the_step_that_computes_what_is_new(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    """The first copies the kept partial block, computes the rest, and the second has both."""
    conversation, end = text_ids(2 * BLOCK + 20, seed=27), [*invocation, *text_ids(9, 28)]
    served.ask_one([*conversation[: 2 * BLOCK + 9], *end], adapters["first"])
    prompts, folders = [[*conversation, *end]] * 2, [adapters["first"], adapters["second"]]
    answers = served.ask(prompts, folders)
    assert cached(answers) == [2 * BLOCK + 9, 2 * BLOCK + 20]
    assert_peft(answers, prompts, folders)


@pytest.mark.parametrize(("graph_tokens", "steps"), [(60, 1), (200, 2)])
def test_only_a_step_larger_than_every_graph_is_shared_and_the_others_answer_as_in_peft(
    served: Served,
    adapters: dict[str, str],
    invocation: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    graph_tokens: int,
    steps: int,
) -> None:
    """The first prompt alone has about a hundred tokens, all three have less than two hundred."""
    monkeypatch.setattr(served.scheduler.connector, "_in_step_above", graph_tokens)
    prompts = [
        prompt_for(invocation, before=2 * BLOCK + 13, after=after, seed=29) for after in (5, 30, 12)
    ]
    folders = [adapters["first"], adapters["second"], adapters["second"]]
    served.ask(prompts, folders)  # the adapters are in memory from here on
    served.reset()
    planned = steps_of(served, monkeypatch)
    answers = served.ask(prompts, folders)
    assert len(planned) == steps
    assert cached(answers) == [0, 2 * BLOCK + 13, 2 * BLOCK + 13]
    assert_peft(answers, prompts, folders)


def steps_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Copies]:
    """The copies of every step that computes anything from now on."""
    planned, connector = list[Copies](), served.scheduler.connector
    build = connector.build_connector_meta

    def noted(output: Any) -> Copies:
        copies: Copies = build(output)
        if output.num_scheduled_tokens:
            planned.append(copies)
        return copies

    monkeypatch.setattr(connector, "build_connector_meta", noted)
    return planned


def test_conversations_that_differ_only_in_their_partial_blocks_do_not_share_them(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    blocks = text_ids(2 * BLOCK, seed=30)
    prompts = [
        [*blocks, *text_ids(11, seed), *invocation, *text_ids(6, 33)] for seed in (31, 32, 31, 32)
    ]
    folders = [adapters["first"], adapters["first"], adapters["second"], adapters["second"]]
    answers = served.ask(prompts, folders)
    assert cached(answers) == [0, 2 * BLOCK, 2 * BLOCK + 11, 2 * BLOCK + 11]
    assert_peft(answers, prompts, folders)


def test_conversations_that_end_alike_do_not_share_their_partial_blocks(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    end = [*text_ids(11, 41), *invocation, *text_ids(6, 42)]
    prompts = [[*text_ids(2 * BLOCK, seed), *end] for seed in (43, 44)]
    folders = [adapters["first"], adapters["second"]]
    served.ask(prompts, [None, None])
    answers = [
        served.ask_one(prompt, folder) for prompt, folder in zip(prompts, folders, strict=True)
    ]
    assert cached(answers) == [2 * BLOCK, 2 * BLOCK]
    assert_peft(answers, prompts, folders)


def test_the_least_recently_used_partial_block_makes_room(
    small: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    prompts = [
        prompt_for(invocation, before=BLOCK + 9, after=9, seed=50 + seed)
        for seed in range(KEPT + 1)
    ]
    for prompt in (*prompts[:KEPT], prompts[0], prompts[KEPT]):  # 0 is used again, so 1 goes
        small.ask_one(prompt, adapters["first"])
    again = [prompts[number] for number in (0, KEPT, 1)]
    answers = [small.ask_one(prompt, adapters["second"]) for prompt in again]
    assert cached(answers) == [BLOCK + 9, BLOCK + 9, BLOCK]
    assert_peft(answers, again, [adapters["second"]] * 3)


def test_one_who_finds_its_own_last_block_in_the_cache_shares_what_it_begins_with(
    small: Served,
    adapters: dict[str, str],
    invocation: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The partial block is not kept any more, the whole block that begins with it is."""
    for seed in range(4):
        small.ask_one(text_ids(6 * BLOCK, seed), None)  # so that no block is empty
    prompt = prompt_for(invocation, before=BLOCK - 2, after=9, seed=62)
    small.ask_one(prompt, adapters["first"])
    for seed in range(KEPT):
        other = prompt_for(invocation, before=9, after=9, seed=63 + seed)
        small.ask_one(other, adapters["second"])  # which is read by then, and need not wait
    folders = [adapters["first"], adapters["second"]]
    planned = steps_of(small, monkeypatch)
    answers = small.ask([prompt, prompt], folders)
    (share,) = planned[0].shares
    assert (share.start, share.stop) == (BLOCK - 2, BLOCK - 2)
    assert cached(answers) == [BLOCK, BLOCK - 2]
    assert_peft(answers, [prompt, prompt], folders)


def test_base_requests_and_plain_loras_are_left_alone(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    prompt = prompt_for(invocation, before=BLOCK + 9, after=9, seed=60)
    folders = [adapters["first"], None, adapters["lora"], adapters["second"], adapters["marked"]]
    prompts = [
        prompt,
        prompt,
        prompt,
        prompt,
        prompt_for([7, 11, 13], before=BLOCK + 20, after=9, seed=61),
    ]
    answers = served.ask(prompts, folders)
    assert cached(answers)[1:4] == [BLOCK, 0, BLOCK + 9]
    assert_peft(answers, prompts, folders)


def test_a_partial_block_whose_request_is_cancelled_is_computed_by_the_next(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    engine = served.llm.llm_engine
    prompt = prompt_for(invocation, before=BLOCK + 9, after=9, seed=70)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    served.limit_step(7)
    for number, kind in enumerate(("first", "second")):
        engine.add_request(
            str(number),
            {"prompt_token_ids": prompt},
            params,
            lora_request=served.request(adapters[kind]),
        )
    engine.step()
    engine.abort_request(["0"])
    outputs = [
        output for _ in range(20) if engine.has_unfinished_requests() for output in engine.step()
    ]
    engine.abort_request(["1"])  # were it waiting for ever, the session's engine would too
    assert [output.request_id for output in outputs if output.finished] == ["1"]
    assert served.ask_one(prompt, adapters["second"]).cached_tokens == BLOCK + 9
    assert_peft([served.ask_one(prompt, adapters["second"])], [prompt], [adapters["second"]])


def test_a_partial_block_without_its_conversation_is_of_no_use(
    small: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    prompt = prompt_for(invocation, before=BLOCK + 9, after=20, seed=75)
    small.ask_one(prompt, adapters["first"])
    for seed in range(4):
        small.ask_one(text_ids(6 * BLOCK, seed), None)  # has no partial block, and needs the blocks
    answers = [small.ask_one(prompt, adapters["second"])]
    assert cached(answers) == [0]
    assert_peft(answers, [prompt], [adapters["second"]])


def test_a_partial_block_is_forgotten_with_the_prefix_cache(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    prompt = prompt_for(
        invocation, before=9, after=9, seed=80
    )  # no whole block: the partial one would be found without any
    served.ask_one(prompt, adapters["first"])
    assert served.ask_one(prompt, adapters["second"]).cached_tokens == 9
    assert served.llm.reset_prefix_cache()
    assert served.ask_one(prompt, adapters["second"]).cached_tokens == 0


def test_with_too_few_blocks_nobody_waits_for_ever(
    small: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    prompts = [
        prompt_for(invocation, before=3 * BLOCK + 9, after=20 + number, seed=90 + number % 3)
        for number in range(24)
    ]
    folders = [adapters[("first", "second")[number % 2]] for number in range(24)]
    assert_peft(small.ask(prompts, folders), prompts, folders)


def test_without_a_connector_every_adapter_computes_its_own(
    served: Served,
    adapters: dict[str, str],
    invocation: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served.scheduler, "connector", None)
    prompts = [prompt_for(invocation, before=BLOCK + 9, after=9, seed=95)] * 2
    folders = [adapters["first"], adapters["second"]]
    answers = served.ask(prompts, folders)
    assert cached(answers) == [0, BLOCK]
    assert_peft(answers, prompts, folders)
