"""The served answer is PEFT's, whatever is batched, cached, cut or shared. Random adapters and
prompts, real vLLM.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request
from vllm_alora.activation import activation_start
from vllm_alora.adapter import read_adapter

from tests.serve.adapters import peft_model, save_variant
from tests.serve.served import BLOCK, MAX_SEQS, Answer, Served, reference

pytestmark = pytest.mark.slow

TOLERANCE = 5e-4  # of a log-probability, in float32; adapters differ by more than 1000 times that
KINDS = [None, "lora", "first", "second", "marked"]


def text_ids(count: int, seed: int) -> list[int]:
    """`count` random ids of ordinary text."""
    draw = random.Random(seed)
    return [draw.randrange(20, 16000) for _ in range(count)]


def prompt_for(invocation: Sequence[int], *, before: int, after: int, seed: int) -> list[int]:
    """Random text with `invocation` in it, `before` tokens in front of it and `after` tokens behind
    it.
    """
    return [*text_ids(before, seed), *invocation, *text_ids(after, seed + 1000)]


def invocation_of(folder: str | None) -> tuple[int, ...]:
    return read_adapter(folder).invocation if folder else ()


def mixed_batch(
    adapters: dict[str, str], sizes: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], list[str | None]]:
    """One prompt per kind and (before, after), as prompts and adapter folders, in an order that
    mixes the kinds.
    """
    prompts, folders = [], []
    for seed, (before, after) in enumerate(sizes):
        for kind in KINDS:
            folder = adapters[kind] if kind else None
            prompts.append(
                prompt_for(invocation_of(folder) or [99], before=before, after=after, seed=seed)
            )
            folders.append(folder)
    return prompts, folders


def assert_peft(
    answers: Sequence[Answer], prompts: Sequence[Sequence[int]], folders: Sequence[str | None]
) -> None:
    for answer, prompt, folder in zip(answers, prompts, folders, strict=True):
        torch.testing.assert_close(
            answer.log_probs, reference(prompt, folder), atol=TOLERANCE, rtol=0
        )


def test_the_adapters_of_these_tests_answer_differently(
    adapters: dict[str, str], prompts: Any
) -> None:
    prompt = prompt_for(prompts.invocation("a rule"), before=40, after=20, seed=1)
    answers = [
        reference(prompt, adapters[kind] if kind else None)
        for kind in (None, "lora", "first", "second")
    ]
    assert all(
        (one - other).abs().max() > 1000 * TOLERANCE
        for i, one in enumerate(answers)
        for other in answers[:i]
    )


def test_base_lora_and_several_aloras_in_one_batch_answer_as_in_peft(
    served: Served, adapters: dict[str, str]
) -> None:
    prompts, folders = mixed_batch(adapters, sizes=[(5, 3), (33, 20), (0, 40), (150, 1), (63, 31)])
    assert_peft(served.ask(prompts, folders), prompts, folders)


def test_the_answer_is_peft_s_wherever_the_invocation_falls_in_a_block(
    served: Served, adapters: dict[str, str]
) -> None:
    prompts = [
        prompt_for(invocation_of(adapters["first"]), before=before, after=9, seed=5)
        for before in range(BLOCK - 4, 2 * BLOCK + 2)
    ]
    folders = [adapters["first"]] * len(prompts)
    assert_peft(served.ask(prompts, folders), prompts, folders)
    assert_peft(served.ask(prompts, folders), prompts, folders)  # again, from the cache


@pytest.mark.parametrize("tokens", [1, 7, BLOCK, 45])
def test_prefill_may_be_cut_anywhere(served: Served, adapters: dict[str, str], tokens: int) -> None:
    prompts, folders = mixed_batch(adapters, sizes=[(30, 12), (50, 5)])
    served.limit_step(tokens)
    assert_peft(served.ask(prompts, folders), prompts, folders)


def test_an_answer_from_the_cache_is_the_answer_without_it(
    served: Served, adapters: dict[str, str]
) -> None:
    prompts, folders = mixed_batch(adapters, sizes=[(100, 45)])
    cold = served.ask(prompts, folders)
    warm = served.ask(prompts, folders)
    assert all(answer.cached_tokens >= 4 * BLOCK for answer in warm)
    for one, other in zip(cold, warm, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=TOLERANCE, rtol=0)


def test_a_prefix_is_computed_once_for_the_base_and_all_aloras(
    served: Served, adapters: dict[str, str]
) -> None:
    prompt = prompt_for(invocation_of(adapters["first"]), before=100, after=20, seed=3)
    order = ["first", "second", None, "first"]
    cached = [
        served.ask_one(prompt, adapters[kind] if kind else None).cached_tokens for kind in order
    ]
    assert cached == [0, 100, 96, 100]


def test_blocks_behind_the_activation_point_are_not_shared(
    served: Served, adapters: dict[str, str]
) -> None:
    prompt = prompt_for(invocation_of(adapters["first"]), before=100, after=80, seed=3)
    cached = [
        served.ask_one(prompt, adapters[kind] if kind else None).cached_tokens
        for kind in ("first", "second", None, "second")
    ]
    assert cached == [0, 100, 96, 160]


def test_a_plain_lora_shares_nothing(served: Served, adapters: dict[str, str]) -> None:
    prompt = prompt_for([99], before=100, after=20, seed=3)
    cached = [
        served.ask_one(prompt, adapters[kind] if kind else None).cached_tokens
        for kind in (None, "lora", None)
    ]
    assert cached == [0, 0, 96]


def test_one_batch_of_128_aloras_answers_as_one_at_a_time(
    served: Served, adapters: dict[str, str], tmp_path: Path
) -> None:
    folders = [
        save_variant(tmp_path / str(seed), adapters["second"], seed=seed)
        for seed in range(MAX_SEQS)
    ]
    invocation = invocation_of(adapters["second"])
    conversation = text_ids(75, seed=8)
    prompts = [
        [*conversation, *invocation, *text_ids(5 + seed % 11, seed)] for seed in range(MAX_SEQS)
    ]
    together = served.ask(prompts, folders)
    assert [answer.cached_tokens for answer in together].count(75) == MAX_SEQS - 1
    some = range(0, MAX_SEQS, 17)
    assert_peft([together[i] for i in some], [prompts[i] for i in some], [folders[i] for i in some])
    for i in range(1, MAX_SEQS, 8):
        torch.testing.assert_close(
            served.ask_one(prompts[i], folders[i]).log_probs,
            together[i].log_probs,
            atol=TOLERANCE,
            rtol=0,
        )


def key_values(served: Served, prompt: list[int], blocks: int) -> list[torch.Tensor]:
    """The base's cached K/V of the first `blocks` blocks of `prompt`, per layer [blocks, ...]."""
    params = SamplingParams(max_tokens=1)
    hashes = Request(
        "probe", prompt, params, None, block_hasher=served.core.request_block_hasher
    ).block_hashes[:blocks]
    pool = served.scheduler.kv_cache_manager.block_pool
    ids = [pool.get_cached_block(block_hash, [0])[0].block_id for block_hash in hashes]
    return [layer[ids].clone() for layer in served.runner.kv_caches]


def test_before_the_activation_point_k_and_v_are_the_bases_bit_for_bit(
    served: Served, adapters: dict[str, str]
) -> None:
    prompt = prompt_for(invocation_of(adapters["first"]), before=4 * BLOCK + 3, after=20, seed=11)
    found = []
    for folder in (None, adapters["first"]):
        served.reset()
        served.ask_one(prompt, folder)
        found.append(key_values(served, prompt, blocks=4))
    assert len(found[0]) == 6 and all(layer.abs().max() > 0 for layer in found[0])
    assert all(torch.equal(base, alora) for base, alora in zip(*found, strict=True))


def test_a_base_request_after_a_guard_is_exactly_the_base_s(
    served: Served, adapters: dict[str, str]
) -> None:
    prompt = prompt_for(invocation_of(adapters["first"]), before=4 * BLOCK + 3, after=20, seed=12)
    answers = []
    for folder in (None, adapters["first"]):
        served.reset()
        served.ask_one(prompt, folder)
        answers.append(served.ask_one(prompt, None))
    assert answers[0].cached_tokens == answers[1].cached_tokens == 4 * BLOCK
    assert torch.equal(answers[0].log_probs, answers[1].log_probs)


@pytest.mark.parametrize("kind", ["first", "lora"])
def test_an_adapter_trained_again_under_its_name_and_path_is_served_new(
    served: Served, adapters: dict[str, str], tmp_path: Path, kind: str
) -> None:
    folder = Path(shutil.copytree(adapters[kind], tmp_path / "adapter"))
    prompt = prompt_for(invocation_of(adapters[kind]) or [99], before=40, after=60, seed=13)
    old = served.ask_one(prompt, str(folder))
    save_variant(folder, adapters[kind], seed=77)
    new = served.ask_one(prompt, str(folder))
    assert new.cached_tokens == (40 if kind == "first" else 0)
    assert_peft([old], [prompt], [adapters[kind]])
    assert_peft([new], [prompt], [save_variant(tmp_path / "again", adapters[kind], seed=77)])
    shutil.copytree(adapters[kind], folder, dirs_exist_ok=True)
    assert_peft([served.ask_one(prompt, str(folder))], [prompt], [adapters[kind]])


def test_two_versions_of_one_adapter_in_one_batch_are_two_adapters(
    served: Served, adapters: dict[str, str], tmp_path: Path
) -> None:
    folders = [adapters["first"], save_variant(tmp_path, adapters["first"], seed=78)]
    prompt = prompt_for(invocation_of(folders[0]), before=40, after=9, seed=14)
    requests = [served.request(folder, name="rule", adapter_id=900) for folder in folders]
    assert_peft(served.ask_requests([prompt, prompt], requests), [prompt, prompt], folders)


def test_tokens_decoded_after_the_prompt_are_the_adapters(
    served: Served, adapters: dict[str, str]
) -> None:
    prompt = prompt_for(invocation_of(adapters["first"]), before=40, after=9, seed=15)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, detokenize=False)
    (output,) = served.llm.generate(
        [{"prompt_token_ids": prompt}],
        params,
        lora_request=served.request(adapters["first"]),
        use_tqdm=False,
    )
    wanted = list(prompt)
    start = activation_start(prompt, invocation_of(adapters["first"]))
    assert start == 40
    model = peft_model(adapters["first"], torch.float32)
    for _ in range(30):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([wanted]), alora_offsets=[len(wanted) - start]
            ).logits[0, -1]
        wanted.append(int(logits.argmax()))
    assert list(output.outputs[0].token_ids) == wanted[len(prompt) :]


def test_several_samples_of_one_request_have_its_adapter(
    served: Served, adapters: dict[str, str]
) -> None:
    prompt = prompt_for(invocation_of(adapters["first"]), before=40, after=9, seed=16)
    params = SamplingParams(
        n=3, max_tokens=1, temperature=1.0, seed=1, logprobs=0, detokenize=False
    )
    (output,) = served.llm.generate(
        [{"prompt_token_ids": prompt}],
        params,
        lora_request=served.request(adapters["first"]),
        use_tqdm=False,
    )
    logits = (
        peft_model(adapters["first"], torch.float32)(input_ids=torch.tensor([prompt]))
        .logits[0, -1]
        .log_softmax(-1)
    )
    for sample in output.outputs:
        assert sample.logprobs[0][sample.token_ids[0]].logprob == pytest.approx(
            float(logits[sample.token_ids[0]]), abs=TOLERANCE
        )
