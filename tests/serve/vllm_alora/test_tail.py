"""Tails are computed once, and nobody's answer changes: real vLLM with the connector, random adapters and prompts, against PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from vllm import SamplingParams
from vllm_alora.adapter import read_adapter
from vllm_alora.tail import KEPT_TAILS

from tests.serve.served import BLOCK, Answer, Served
from tests.serve.vllm_alora.test_parity import assert_peft, prompt_for, text_ids

KEPT = 4  # tails


@pytest.fixture(scope="module")
def small_engine() -> Iterator[Served]:
    """An engine that keeps four tails and has room for two of the longest prompts."""
    settings = {"num_gpu_blocks_override": 17, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    engine = Served.start(additional_config={KEPT_TAILS: KEPT}, **settings)
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


@pytest.mark.parametrize("tokens", [1, 7, BLOCK, 45])
def test_others_wait_for_a_tail_however_prefill_is_cut(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...], tokens: int
) -> None:
    prompts = [prompt_for(invocation, before=BLOCK + 13, after=after, seed=22) for after in (5, 30, 12)]
    folders = [adapters["first"], adapters["second"], adapters["second"]]
    served.limit_step(tokens)
    answers = served.ask(prompts, folders)
    assert cached(answers) == [0, BLOCK + 13, BLOCK + 13]
    assert_peft(answers, prompts, folders)


def test_conversations_that_differ_only_in_their_tails_do_not_share_them(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    blocks = text_ids(2 * BLOCK, seed=30)
    prompts = [[*blocks, *text_ids(11, seed), *invocation, *text_ids(6, 33)] for seed in (31, 32, 31, 32)]
    folders = [adapters["first"], adapters["first"], adapters["second"], adapters["second"]]
    answers = served.ask(prompts, folders)
    assert cached(answers) == [0, 2 * BLOCK, 2 * BLOCK + 11, 2 * BLOCK + 11]
    assert_peft(answers, prompts, folders)


def test_conversations_that_end_alike_do_not_share_their_tails(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    end = [*text_ids(11, 41), *invocation, *text_ids(6, 42)]
    prompts = [[*text_ids(2 * BLOCK, seed), *end] for seed in (43, 44)]
    folders = [adapters["first"], adapters["second"]]
    served.ask(prompts, [None, None])
    answers = [served.ask_one(prompt, folder) for prompt, folder in zip(prompts, folders, strict=True)]
    assert cached(answers) == [2 * BLOCK, 2 * BLOCK]
    assert_peft(answers, prompts, folders)


def test_the_least_recently_used_tail_makes_room(small: Served, adapters: dict[str, str], invocation: tuple[int, ...]) -> None:
    prompts = [prompt_for(invocation, before=BLOCK + 9, after=9, seed=50 + seed) for seed in range(KEPT + 1)]
    for prompt in (*prompts[:KEPT], prompts[0], prompts[KEPT]):  # 0 is used again, so 1 goes
        small.ask_one(prompt, adapters["first"])
    again = [prompts[number] for number in (0, KEPT, 1)]
    answers = [small.ask_one(prompt, adapters["second"]) for prompt in again]
    assert cached(answers) == [BLOCK + 9, BLOCK + 9, BLOCK]
    assert_peft(answers, again, [adapters["second"]] * 3)


def test_base_requests_and_plain_loras_are_left_alone(served: Served, adapters: dict[str, str], invocation: tuple[int, ...]) -> None:
    prompt = prompt_for(invocation, before=BLOCK + 9, after=9, seed=60)
    folders = [adapters["first"], None, adapters["lora"], adapters["second"], adapters["marked"]]
    prompts = [prompt, prompt, prompt, prompt, prompt_for([7, 11, 13], before=BLOCK + 20, after=9, seed=61)]
    answers = served.ask(prompts, folders)
    assert cached(answers)[1:4] == [BLOCK, 0, BLOCK + 9]
    assert_peft(answers, prompts, folders)


def test_a_tail_whose_request_is_cancelled_is_computed_by_the_next(
    served: Served, adapters: dict[str, str], invocation: tuple[int, ...]
) -> None:
    engine = served.llm.llm_engine
    prompt = prompt_for(invocation, before=BLOCK + 9, after=9, seed=70)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    served.limit_step(7)
    for number, kind in enumerate(("first", "second")):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params, lora_request=served.request(adapters[kind]))
    engine.step()
    engine.abort_request(["0"])
    outputs = [output for _ in range(20) if engine.has_unfinished_requests() for output in engine.step()]
    engine.abort_request(["1"])  # were it waiting for ever, the session's engine would too
    assert [output.request_id for output in outputs if output.finished] == ["1"]
    assert served.ask_one(prompt, adapters["second"]).cached_tokens == BLOCK + 9
    assert_peft([served.ask_one(prompt, adapters["second"])], [prompt], [adapters["second"]])


def test_a_tail_without_its_conversation_is_of_no_use(served: Served, adapters: dict[str, str], invocation: tuple[int, ...]) -> None:
    prompt = prompt_for(invocation, before=BLOCK + 9, after=80, seed=75)
    served.ask_one(prompt, adapters["first"])
    again = served.ask_one(prompt, adapters["first"])  # has more than its tail
    assert served.llm.reset_prefix_cache()  # the conversation, and not the connector's tails
    answers = [again, served.ask_one(prompt, adapters["second"])]
    assert cached(answers) == [3 * BLOCK, 0]
    assert_peft(answers, [prompt] * 2, [adapters["first"], adapters["second"]])


def test_a_tail_is_forgotten_with_the_prefix_cache(served: Served, adapters: dict[str, str], invocation: tuple[int, ...]) -> None:
    prompt = prompt_for(invocation, before=9, after=9, seed=80)  # no whole block: the tail would be found without any
    served.ask_one(prompt, adapters["first"])
    assert served.ask_one(prompt, adapters["second"]).cached_tokens == 9
    assert served.llm.reset_prefix_cache(reset_connector=True)
    assert served.ask_one(prompt, adapters["second"]).cached_tokens == 0


def test_too_few_blocks_preempt_and_nobody_waits_for_ever(small: Served, adapters: dict[str, str], invocation: tuple[int, ...]) -> None:
    prompts = [prompt_for(invocation, before=3 * BLOCK + 9, after=20 + number, seed=90 + number % 3) for number in range(24)]
    folders = [adapters[("first", "second")[number % 2]] for number in range(24)]
    assert_peft(small.ask(prompts, folders), prompts, folders)


def test_without_kept_tails_every_adapter_computes_its_own(adapters: dict[str, str], invocation: tuple[int, ...]) -> None:
    engine = Served.start(additional_config={KEPT_TAILS: 0})
    try:
        prompts = [prompt_for(invocation, before=BLOCK + 9, after=9, seed=95)] * 2
        folders = [adapters["first"], adapters["second"]]
        answers = engine.ask(prompts, folders)
        assert cached(answers) == [0, BLOCK]
        assert_peft(answers, prompts, folders)
    finally:
        engine.close()
