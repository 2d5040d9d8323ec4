"""The served answer is PEFT's, whatever is batched, cached, cut or shared, on the real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request
from vllm_alora.adapter import AdapterError
from vllm_alora.arrival import InvocationError
from vllm_alora.handover import activation_start

from guard.home import ROOT
from tests.serve.adapters import peft_model, save_variant
from tests.serve.served import BLOCK, MAX_SEQS, MAX_STEP_TOKENS, Served, reference
from tests.serve.vllm_alora.checked_engine import (
    TOLERANCE,
    CheckedEngine,
    assert_peft,
    invocation_of,
    prompt_for,
    text_ids,
)

pytestmark = pytest.mark.slow

KINDS = [None, "lora", "first", "second", "marked"]
FOUR = [None, "lora", "first", "second"]


def test_the_adapters_of_these_tests_answer_differently(checked: CheckedEngine) -> None:
    prompt = checked.prompt(40, 20, seed=1)
    answers = torch.stack([reference(prompt, checked.folder(kind)) for kind in FOUR])
    apart = torch.cdist(answers, answers, p=torch.inf) + torch.eye(len(FOUR)) * 10**6
    assert (apart > 1000 * TOLERANCE).all()


@pytest.mark.parametrize("step_tokens", [MAX_STEP_TOKENS, 1, 7, BLOCK, 45])
def test_base_lora_and_aloras_in_one_batch_answer_as_in_peft(
    checked: CheckedEngine, step_tokens: int
) -> None:
    """Also where the prefill is cut anywhere."""
    checked.served.limit_step(step_tokens)
    whole = [(5, 3), (33, 20), (0, 40), (150, 1), (63, 31)]
    of_steps = {MAX_STEP_TOKENS: whole, 1: [(30, 12)]}
    sizes = of_steps.get(step_tokens, [(30, 12), (50, 5)])
    prompts: list[list[int]] = []
    for seed, (before, after) in enumerate(sizes):
        for kind in KINDS:
            invocation = invocation_of(checked.folder(kind)) or [99]
            prompts.append(prompt_for(invocation, before=before, after=after, seed=seed))
    checked.ask(prompts, KINDS * len(sizes))


def test_the_answer_is_peft_s_wherever_the_invocation_falls(checked: CheckedEngine) -> None:
    prompts = [checked.prompt(before, seed=5) for before in range(BLOCK - 4, 2 * BLOCK + 2)]
    for _ in range(2):  # again, from the cache
        checked.ask(prompts, ["first"] * len(prompts))


@pytest.mark.parametrize(
    ("after", "kinds", "cached"),
    [
        (20, ["first", "second", None, "first"], [0, 100, 96, 100]),
        # Behind the activation point nothing is shared.
        (80, ["first", "second", None, "second"], [0, 100, 96, 160]),
        (20, [None, "lora", None], [0, 0, 96]),
    ],
)
def test_a_prefix_is_computed_once_for_the_base_and_all_aloras(
    checked: CheckedEngine, after: int, kinds: list[str | None], cached: list[int]
) -> None:
    prompt = checked.prompt(100, after, seed=3)
    assert checked.ask_each([prompt] * len(kinds), kinds) == cached


def test_128_aloras_in_a_batch_answer_as_in_peft(checked: CheckedEngine, tmp_path: Path) -> None:
    served, second = checked.served, checked.adapters["second"]
    folders = [save_variant(tmp_path / str(seed), second, seed=seed) for seed in range(MAX_SEQS)]
    conversation = [*text_ids(75, seed=8), *invocation_of(second)]
    prompts = [[*conversation, *text_ids(5 + seed % 11, seed)] for seed in range(MAX_SEQS)]
    together = served.ask(prompts, folders)
    assert [answer.cached_tokens for answer in together].count(75) == MAX_SEQS - 1
    some = slice(0, MAX_SEQS, 17)
    assert_peft(together[some], prompts[some], folders[some])


def key_values(checked: CheckedEngine, prompt: list[int], blocks: int) -> list[torch.Tensor]:
    """The base's cached K/V of the first `blocks` blocks of `prompt`, per layer [blocks, ...]."""
    served = checked.served
    hasher = served.core.request_block_hasher
    probe = Request("probe", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    pool = served.scheduler.kv_cache_manager.block_pool
    hashes = probe.block_hashes[:blocks]
    ids = [pool.get_cached_block(block_hash, [0])[0].block_id for block_hash in hashes]
    return [layer[ids].clone() for layer in served.runner.kv_caches]


def test_before_the_activation_point_k_and_v_are_the_bases_bits(checked: CheckedEngine) -> None:
    prompt = checked.prompt(4 * BLOCK + 3, 20, seed=11)
    found = []
    for kind in (None, "first"):
        checked.served.reset()
        checked.ask([prompt], [kind])
        found.append(key_values(checked, prompt, blocks=4))
        assert checked.ask([prompt], [None]) == [4 * BLOCK]
    assert len(found[0]) == 6 and all(layer.abs().max() > 0 for layer in found[0])
    assert all(torch.equal(base, alora) for base, alora in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["first", "lora"])
def test_an_adapter_trained_again_under_its_name_and_path_is_served_new(
    checked: CheckedEngine, tmp_path: Path, kind: str
) -> None:
    served, source = checked.served, checked.adapters[kind]
    folder = str(shutil.copytree(source, tmp_path / "adapter"))
    prompt = checked.prompt(40, 60, seed=13)
    old = served.ask_one(prompt, folder)
    save_variant(Path(folder), source, seed=77)
    new = served.ask_one(prompt, folder)
    assert new.cached_tokens == (40 if kind == "first" else 0)
    again = save_variant(tmp_path / "again", source, seed=77)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    answers = [old, new, served.ask_one(prompt, folder)]
    assert_peft(answers, [prompt] * 3, [source, again, source])


def test_two_versions_in_one_batch_are_two_adapters(checked: CheckedEngine, tmp_path: Path) -> None:
    first = checked.adapters["first"]
    folders = [first, save_variant(tmp_path, first, seed=78)]
    prompts = [checked.prompt(40, seed=14)] * 2
    requests = [LoRARequest("rule", 900, folder) for folder in folders]
    assert_peft(checked.served.ask_requests(prompts, requests), prompts, folders)


def test_tokens_decoded_later_and_all_samples_are_the_adapter_s(checked: CheckedEngine) -> None:
    served, first = checked.served, checked.adapters["first"]
    prompt, model = checked.prompt(40, seed=15), peft_model(first, torch.float32)
    assert activation_start(prompt, checked.invocation) == 40
    inputs, lora = [{"prompt_token_ids": prompt}], served.request(first)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, detokenize=False)
    (output,) = served.llm.generate(inputs, params, lora_request=lora, use_tqdm=False)
    wanted = list(prompt)
    for _ in range(30):
        with torch.no_grad():
            offsets = [len(wanted) - 40]
            logits = model(input_ids=torch.tensor([wanted]), alora_offsets=offsets).logits[0, -1]
        wanted.append(int(logits.argmax()))
    assert list(output.outputs[0].token_ids) == wanted[len(prompt) :]
    params = SamplingParams(n=3, max_tokens=1, seed=1, logprobs=0, detokenize=False)
    (output,) = served.llm.generate(inputs, params, lora_request=lora, use_tqdm=False)
    expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for sample in output.outputs:
        (token,) = sample.token_ids
        found = sample.logprobs[0][token].logprob
        assert found == pytest.approx(float(expected[token]), abs=TOLERANCE)


def changed(folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    weights = folder / "adapter_model.safetensors"
    save_file(dict(change(*item) for item in load_file(weights).items()), weights)


def test_what_is_refused_is_one_request_s_error(
    served: Served, adapters: dict[str, str], tmp_path: Path
) -> None:
    """NaN, a prompt without the invocation, and when it is preloaded a tensor without a place."""
    prompt, engine = list(range(30, 70)), served.llm.llm_engine
    broken = Path(shutil.copytree(adapters["lora"], tmp_path / "broken"))
    changed(broken, lambda name, tensor: (name, torch.full_like(tensor, torch.nan)))
    with pytest.raises(AdapterError, match="NaN"):
        served.ask([prompt[:20], prompt], [None, str(broken)])
    with pytest.raises(InvocationError, match="does not contain the invocation tokens"):
        served.ask_one(prompt, adapters["first"])
    misplaced = Path(shutil.copytree(adapters["lora"], tmp_path / "misplaced"))
    changed(misplaced, lambda name, tensor: (name.replace("layers.5", "layers.6"), tensor))
    problem = r"layers that the engine cannot adapt \(got model\.layers\.6"
    with pytest.raises(AdapterError, match=problem):
        engine.add_lora(served.request(str(misplaced)))
    assert not served.scheduler.has_unfinished_requests()
    preloaded = served.request(adapters["lora"])
    engine.add_lora(preloaded)
    assert preloaded.lora_int_id in engine.list_loras()
    asked_of = [None, adapters["lora"]]
    assert_peft(served.ask([prompt] * 2, asked_of), [prompt] * 2, asked_of)


def test_an_engine_in_its_own_process_serves_all(adapters: dict[str, str], prompts: Any) -> None:
    prompt = [*range(30, 130), *prompts.invocation("a rule"), *range(200, 215)]
    first, second, lora = (adapters[kind] for kind in ("first", "second", "lora"))
    folders = [None, first, second, lora, first]
    code = f"from tests.serve.vllm_alora import test_parity as t; t.serve({prompt!r}, {folders!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["in its own process"] and found["refusal"] == "InvocationError"
    assert found["cached tokens"] == [0, 96, 100, 0, 100, 96]
    for log_probs, folder in zip(found["log probs"], [*folders, None], strict=True):
        exact = reference(prompt, folder)
        noise = (reference(prompt, folder, torch.bfloat16) - exact).abs().max()
        assert (torch.tensor(log_probs) - exact).abs().max() < 3 * noise + 0.01


def serve(prompt: list[int], folders: list[str | None]) -> None:
    """What runs in the other process: ask each, be refused once, ask again; print all."""
    sizes = {"max_loras": 4, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    served = Served.start(dtype="bfloat16", enforce_eager=True, **sizes)
    answers = [served.ask_one(prompt, folder) for folder in folders]
    refusal = ""
    try:
        served.ask_one(prompt[:40], folders[1])
    except ValueError as error:
        refusal = type(error).__name__
    answers.append(served.ask_one(prompt, None))
    found = {
        "in its own process": not hasattr(served.llm.llm_engine.engine_core, "engine_core"),
        "refusal": refusal,
        "cached tokens": [answer.cached_tokens for answer in answers],
        "log probs": [answer.log_probs.tolist() for answer in answers],
    }
    served.close()
    print(json.dumps(found))
