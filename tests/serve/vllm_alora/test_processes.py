"""The same in production's shape: the engine core in a process of its own, bfloat16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from guard.home import ROOT
from tests.serve.served import Served, reference

pytestmark = pytest.mark.slow

ORDER = [None, "first", "second", "lora", "first"]


def test_an_engine_in_its_own_process_serves_base_lora_and_alora(
    adapters: dict[str, str], prompts: Any
) -> None:
    prompt = [*range(30, 130), *prompts.invocation("a rule"), *range(200, 215)]
    folders = [adapters[kind] if kind else None for kind in ORDER]
    code = (
        f"from tests.serve.vllm_alora import test_processes as t; t.serve({prompt!r}, {folders!r})"
    )
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
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
    """What runs in the other process: ask one after the other, be refused once, ask again; print
    what came of it.
    """
    served = Served.start(dtype="bfloat16", max_loras=4, max_num_seqs=8, max_num_batched_tokens=512)
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
