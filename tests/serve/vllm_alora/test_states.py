"""Rows of the step's hidden states, kept for those who ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm_alora import states
from vllm_alora.states import STATE, gives_states, take_states

from tests.serve.served import Served

pytestmark = pytest.mark.slow

Row = tuple[object, int, int, int]  # key, computed before, scheduled, prompt
ROWS: list[Row] = [
    ("a", 0, 10, 10),
    (None, 0, 10, 10),
    ("b", 32, 8, 40),
    ("part", 0, 8, 40),
    ("generated", 40, 8, 40),
    ({"no": "text"}, 0, 4, 4),  # `vllm_xargs` of a request over HTTP may be anything
]


def params_of(key: object) -> SamplingParams:
    extra_args = None if key is None else {STATE: key}
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra_args)


class ToyRunnerV2(RunnerV2):
    """Stands for a runner amid a step, in which the state of a token is its number."""

    def __init__(self, rows: list[Row]) -> None:
        self.speculative_config = None
        self.sampler = SimpleNamespace()  # type: ignore[assignment]
        # The places of requests in the runner's tables are in another order than the batch's rows.
        places = np.arange(len(rows))[::-1]
        prompts = np.empty(len(rows), np.int32)
        prompts[places] = [row[3] for row in rows]
        prompt_len = SimpleNamespace(np=prompts)
        self.req_states = SimpleNamespace(prompt_len=prompt_len)  # type: ignore[assignment]
        for place, row in zip(places, rows, strict=True):
            self.add(int(place), row[0])
        scheduled = np.array([row[2] for row in rows])
        self.batch = SimpleNamespace(
            idx_mapping_np=places,
            num_computed_tokens_np=np.array([row[1] for row in rows]),
            num_scheduled_tokens=scheduled,
            query_start_loc_np=np.concatenate([[0], np.cumsum(scheduled)]),
        )

    def add(self, place: int, key: object) -> None:
        """Take in a request."""
        states.add_request_v2.wrapper(lambda *_: None, self.sampler, place, params_of(key))

    def sample(self) -> None:
        hidden = torch.arange(int(self.batch.query_start_loc_np[-1]), dtype=torch.bfloat16)
        args = (hidden.view(-1, 1), self.batch, None)
        assert states.sample_v2.wrapper(lambda *_: "vLLM's", self, *args) == "vLLM's"


def kept(runner: Any) -> dict[str, list[float]]:
    taken = take_states(runner)
    assert all(state.dtype == torch.float32 for state in taken.values())
    return {key: state.tolist() for key, state in taken.items()}


def test_runner_v2_keeps_the_last_token_s_row_of_a_prompt_that_ends_in_the_step() -> None:
    runner: Any = ToyRunnerV2(ROWS)
    assert gives_states(runner)
    runner.sample()
    assert kept(runner) == {"a": [9.0], "b": [27.0]} and kept(runner) == {}
    runner.add(3, None)  # in the place of "b": nobody inherits what the request before him asked
    runner.sample()
    assert kept(runner) == {"a": [9.0]}
    runner.speculative_config = object()
    runner.sample()
    assert not gives_states(runner) and kept(runner) == {}
    assert not gives_states(SimpleNamespace(speculative_config=None))


def test_a_real_runner_s_state_gives_the_logits_of_its_output_layer(served: Served) -> None:
    """Nothing is kept of those beside it that do not ask, nor of a prompt's beginning."""
    prompt = list(range(100, 170))
    inputs = [{"prompt_token_ids": prompt}, {"prompt_token_ids": prompt[:50]}]
    served.limit_step(45)

    def generated(*keys: object) -> int:
        """The token behind the first prompt, asked with a key for each."""
        params = [params_of(key) for key in keys]
        outputs = served.llm.generate(inputs[: len(keys)], params, use_tqdm=False)
        return int(outputs[0].outputs[0].token_ids[0])

    token = generated("mine", None)
    (state,) = take_states(served.runner).values()
    logits = served.runner.model.lm_head.weight @ state
    assert int(logits.argmax()) == token and take_states(served.runner) == {}
    generated("mine")
    generated({"no": "text"})  # the next steps forget what nobody took
    assert take_states(served.runner) == {}
