"""Rows of the step's hidden states, kept for those who ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm_alora import states
from vllm_alora.states import STATE, gives_states, take_states

from tests.serve.served import Served

pytestmark = pytest.mark.slow


class ToyRunner(RunnerV1):
    """Stands for a runner amid a step: (key, computed before, scheduled, prompt) a row."""

    def __init__(self, rows: list[tuple[str | None, int, int, int]]) -> None:
        self.speculative_config = None
        names = [f"request {row}" for row in range(len(rows))]
        scheduled = {name: row[2] for name, row in zip(names, rows, strict=True)}
        self.requests = {}
        for name, row in zip(names, rows, strict=True):
            extra = None if row[0] is None else {STATE: row[0]}
            self.requests[name] = SimpleNamespace(sampling_params=SamplingParams(extra_args=extra))
        self.input_batch = SimpleNamespace(
            req_ids=names,
            num_computed_tokens_cpu=[row[1] for row in rows],
            num_prompt_tokens=[row[3] for row in rows],
        )
        self.execute_model_state = SimpleNamespace(
            sample_hidden_states=torch.arange(len(rows) * 4, dtype=torch.bfloat16).view(-1, 4),
            scheduler_output=SimpleNamespace(num_scheduled_tokens=scheduled),
        )


def sampled(runner: Any) -> dict[str, torch.Tensor]:
    """What is kept of a step."""
    assert states.sample_tokens_v1.wrapper(lambda *_: "vLLM's", runner, None) == "vLLM's"
    return take_states(runner)


def test_the_row_of_a_prompt_that_ends_in_the_step_is_kept_in_float32_for_who_asks() -> None:
    others = [("part", 0, 8, 40), ("generated", 40, 8, 40)]
    runner = ToyRunner([("a", 0, 10, 10), (None, 0, 10, 10), ("b", 32, 8, 40), *others])
    kept = sampled(runner)
    found = {key: state.tolist() for key, state in kept.items()}
    assert found == {"a": [0, 1, 2, 3], "b": [8, 9, 10, 11]}
    assert all(state.dtype == torch.float32 for state in kept.values())


def test_what_is_kept_is_a_copy_is_given_once_and_is_forgotten_with_the_next_step() -> None:
    """Else a server whose clients may ask for states would keep one for every request."""
    runner = ToyRunner([("a", 0, 10, 10)])
    states.sample_tokens_v1.wrapper(lambda *_: None, runner, None)
    runner.execute_model_state.sample_hidden_states.zero_()
    assert take_states(runner)["a"].tolist() == [0, 1, 2, 3]
    assert take_states(runner) == {}
    states.sample_tokens_v1.wrapper(lambda *_: None, runner, None)
    runner.requests["request 0"].sampling_params = SamplingParams(extra_args={STATE: "b"})
    assert list(sampled(runner)) == ["b"]


@pytest.mark.parametrize("key", [[1], 7, {"a": "b"}, None])
def test_a_key_that_is_no_text_asks_for_nothing(key: object) -> None:
    """`vllm_xargs` of a request over HTTP may be anything."""
    runner = ToyRunner([(None, 0, 10, 10)])
    runner.requests["request 0"].sampling_params = SamplingParams(extra_args={STATE: key})
    assert sampled(runner) == {}


def test_a_runner_that_speculates_or_has_run_nothing_or_is_another_keeps_nothing() -> None:
    runner: Any = ToyRunner([("a", 0, 10, 10)])
    runner.speculative_config = object()
    assert not gives_states(runner) and sampled(runner) == {}
    runner.speculative_config = runner.execute_model_state = None
    assert gives_states(runner) and sampled(runner) == {}
    assert not gives_states(SimpleNamespace(speculative_config=None))


class ToyRunnerV2(RunnerV2):
    """The other runner in the middle of a step: (key, computed before, scheduled, prompt) a row."""

    def __init__(self, rows: list[tuple[str | None, int, int, int]]) -> None:
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

    def add(self, place: int, key: str | None) -> None:
        """Take in a request."""
        params = SamplingParams(extra_args=None if key is None else {STATE: key})
        states.add_request_v2.wrapper(lambda *_: None, self.sampler, place, params)

    def sampled(self) -> dict[str, list[float]]:
        """What is kept of the step; the state of a token is its number in the step."""
        tokens = int(self.batch.query_start_loc_np[-1])
        hidden = torch.arange(tokens, dtype=torch.bfloat16).view(-1, 1)
        args = (hidden, self.batch, None)
        assert states.sample_v2.wrapper(lambda *_: "vLLM's", self, *args) == "vLLM's"
        return {key: state.tolist() for key, state in take_states(self).items()}


def test_runner_v2_keeps_the_last_token_s_row_of_a_prompt_that_ends_in_the_step() -> None:
    runner = ToyRunnerV2(
        [("a", 0, 10, 10), (None, 0, 10, 10), ("b", 32, 8, 40), ("part", 0, 8, 40), ("c", 0, 4, 4)]
    )
    assert gives_states(runner)
    assert runner.sampled() == {"a": [9.0], "b": [27.0], "c": [39.0]}
    runner.add(0, None)  # nobody inherits what the request before him asked: it was "c"
    assert runner.sampled().keys() == {"a", "b"}
    runner.speculative_config = object()  # type: ignore[assignment]
    assert not gives_states(runner) and runner.sampled() == {}


def test_a_real_runner_s_state_gives_the_logits_of_its_output_layer(served: Served) -> None:
    """And nothing is kept of those beside it that do not ask."""
    prompt = list(range(100, 170))
    plain = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    asks, others = SamplingParams(**plain, extra_args={STATE: "mine"}), SamplingParams(**plain)
    inputs = [{"prompt_token_ids": prompt}, {"prompt_token_ids": prompt[:50]}]
    outputs = served.llm.generate(inputs, [asks, others], use_tqdm=False)
    (state,) = take_states(served.runner).values()
    logits = served.runner.model.lm_head.weight @ state
    assert int(logits.argmax()) == outputs[0].outputs[0].token_ids[0]
