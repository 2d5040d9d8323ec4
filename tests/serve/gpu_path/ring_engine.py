"""Runner V2 with Triton's kernels in float16 against PEFT, on a GPU or interpreted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.platforms import current_platform
from vllm_alora.adapter import read_adapter
from vllm_alora.kv.partial_block_seams import in_step_above

from guard.machine.device import installed_device
from serve.engine import GuardEngine
from tests.serve.adapters import save_random_adapter
from tests.serve.cards import RULE_TEXTS, prompts, recipe
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.heads import reference_logit, save_head
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import assert_peft, prompt_for, steps_of, text_ids

BLOCK = 32
NATS = 0.06  # PEFT's own float16 is up to .017 from its float32; the sums' orders differ too
SLOTS, ADAPTERS = 3, 5
HEAD = "refund_promise"
STEP_TOKENS = 96
ON_CPU = installed_device() == "cpu"
# Of a GPU's memory: vLLM wants that much free for each engine, whatever its cache is given.
SHARE: dict[str, float] = {} if ON_CPU else {"gpu_memory_utilization": 0.1}


def started(**settings: Any) -> Served:
    narrow = {"dtype": "float16", "hf_overrides": {"head_dtype": "float32"}}
    return Served.start(**(narrow | SHARE | settings))


class Swapping:
    """Three slots, steps of 96 tokens: prompts are cut, and adapters swapped. A LoRA and four
    aLoRAs, ranks 4 to 16.
    """

    def __init__(self, root: Path) -> None:
        turn = prompts().invocation("a rule")
        self.folders = [save_random_adapter(root / "0", seed=0, rank=4)]
        for seed in range(1, ADAPTERS):
            folder, rank = root / str(seed), 4 * (1 + seed % 4)
            self.folders.append(save_random_adapter(folder, seed=seed, rank=rank, invocation=turn))
        self.invocation = read_adapter(self.folders[1]).invocation
        self.served = started(
            max_loras=SLOTS,
            max_cpu_loras=ADAPTERS,
            max_num_seqs=8,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=512,
            kv_cache_memory_bytes=2**26,
        )

    def ask(self, folders: Sequence[str | None], before: int, seeds: Sequence[int]) -> list[int]:
        """Ask all at once of prompts of these seeds, against PEFT; how many tokens were cached."""
        self.served.reset()
        asked = []
        for seed in seeds:
            asked.append(prompt_for(self.invocation, before=before, after=5, seed=seed))
        answers = self.served.ask(asked, folders)
        assert_peft(answers, asked, folders, NATS, torch.float16)
        return [answer.cached_tokens for answer in answers]


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swapping]:
    swapping = Swapping(tmp_path_factory.mktemp("adapters"))
    yield swapping
    swapping.served.close()


def test_it_is_runner_v2_with_triton_s_kernels_whose_layers_share(
    swapping: Swapping, monkeypatch: MonkeyPatch
) -> None:
    served, where = swapping.served, "cpu" if ON_CPU else "gpu"
    assert type(served.runner).__module__ == f"vllm.v1.worker.{where}.model_runner"
    manager = served.runner.lora_manager._adapter_manager
    wrappers = {type(wrapper).__name__ for wrapper in manager.punica_wrapper_mapping.values()}
    assert wrappers == {"PunicaWrapperGPU"}
    # As the scheduler asks on a GPU; here nothing is captured.
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert in_step_above(served.core.vllm_config) == 0


def test_chunks_on_shared_and_partial_blocks_are_peft_s(swapping: Swapping) -> None:
    """One conversation of two blocks and a part, cut by the step; every adapter, and the base."""
    cached = swapping.ask([*swapping.folders, None], 2 * BLOCK + 9, [1] * (ADAPTERS + 1))
    assert min(cached[2:ADAPTERS]) >= 2 * BLOCK  # of those behind the first aLoRA
    assert max(cached) == 2 * BLOCK + 9  # the partial block


@pytest.mark.parametrize(("largest_graph", "steps"), [(40, 1), (STEP_TOKENS, 2)])
def test_only_a_step_larger_than_every_graph_is_shared_and_all_answer_as_in_peft(
    swapping: Swapping, monkeypatch: MonkeyPatch, largest_graph: int, steps: int
) -> None:
    """Three aLoRAs on a conversation of a block and a part, all of which a step has room for."""
    monkeypatch.setattr(swapping.served.scheduler.connector, "_in_step_above", largest_graph)
    swapping.ask(swapping.folders[1:4], BLOCK + 9, [8] * 3)  # which are in memory from here on
    planned = steps_of(swapping.served, monkeypatch)
    cached = swapping.ask(swapping.folders[1:4], BLOCK + 9, [8] * 3)
    assert len(planned) == steps
    assert [len(share.blocks) for share in planned[0].shares] == [2] * (steps == 1)
    assert cached == [0, BLOCK + 9, BLOCK + 9]


def test_adapters_without_a_slot_are_swapped_in_again(swapping: Swapping) -> None:
    swapping.ask(random.Random(0).choices(swapping.folders, k=8), 11, range(8))


def test_128_aloras_in_one_step_answer_as_one_at_a_time(tmp_path: Path) -> None:
    """Of one layer type: the interpreter takes milliseconds for each of the step's programs."""
    count, layers = 128, {"rank": 4, "targets": ["o_proj"], "invocation": text_ids(2, 7)}
    saved = []
    for seed in range(count):
        saved.append(save_random_adapter(tmp_path / str(seed), seed=seed, **layers))  # type: ignore[arg-type]
    prompt = [*text_ids(BLOCK, 1), *text_ids(2, 7), *text_ids(1, 3)]
    with started(
        lora_target_modules=layers["targets"],
        max_loras=count,
        max_num_seqs=count,
        max_num_batched_tokens=512,  # all of them in one step
        max_model_len=128,
        kv_cache_memory_bytes=2**27,
    ) as large:
        together = large.ask([prompt] * count, saved)
        large.reset()
        for number in (0, 17, 127):
            alone, other = large.ask_one(prompt, saved[number]), together[number]
            torch.testing.assert_close(other.log_probs, alone.log_probs, atol=0.01, rtol=0)
            assert_peft([other], [prompt], [saved[number]], NATS, torch.float16)


def test_a_verdict_is_peft_s_and_not_nothing(tmp_path: Path) -> None:
    """The product's engine on two aLoRAs and a head: runner V2's sampler knows no two columns, and
    it keeps no state, which a head reads.
    """
    saved = {HEAD: save_head(tmp_path / HEAD, HEAD, seed=7)}
    for seed, name in enumerate(("medical_advice", "pii_leak")):
        saved[name] = save_adapter(tmp_path / name, name, seed=seed)
    tiny = recipe()
    narrow = {"dtype": "float16", "engine": tiny.engine | {"dtype": "float16"}}
    small = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    small |= {"max_loras": 2, "kv_cache_memory_bytes": 2**26}
    with GuardEngine(tiny.model_copy(update=narrow), saved, **small) as engine:
        assert engine.counters.scheduled_tokens == 0  # vLLM's warm-up does not count
        check = engine.check(CONVERSATION)
        assert engine.counters.scheduled_tokens > 0
    assert not check.refused and len(check.verdicts) == 3
    for verdict in check.verdicts:
        expected = peft_logit
        if verdict.rule == HEAD:
            expected = reference_logit
        wanted = expected(CONVERSATION, RULE_TEXTS[verdict.rule], saved[verdict.rule])
        assert verdict.logit == pytest.approx(wanted, abs=0.1)
        assert abs(verdict.logit) > 0.0
