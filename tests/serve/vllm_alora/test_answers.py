"""What comes out of the engine: two columns of the output layer, with the same difference, and rows
of the step's hidden states, kept for those who ask.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm_alora import answers, states
from vllm_alora.answers import ANSWERS
from vllm_alora.states import STATE, gives_states, take_states

from tests.serve.cards import prompts
from tests.serve.engine.shared import runner as runner_of
from tests.serve.guarded import guard_engine
from tests.serve.served import Served

pytestmark = pytest.mark.slow


def logits_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model makes of random states, and the logits of its whole vocabulary."""
    states = torch.randn(5, model.lm_head.weight.shape[1])
    with torch.inference_mode():
        return model.logits_processor(model.lm_head, states), states @ model.lm_head.weight.T


def test_the_guard_engine_computes_two_verdicts_and_any_other_engine_all(served: Served) -> None:
    found, every = logits_of(runner_of(guard_engine()).model)
    torch.testing.assert_close(found, every[:, [prompts().yes_id, prompts().no_id]])
    model = served.runner.model
    assert logits_of(model)[0].shape == (5, model.logits_processor.org_vocab_size)


def test_a_bfloat16_base_s_answers_are_computed_in_the_output_layer_s_dtype() -> None:
    """In float32, as the guard engine sets it: of bfloat16 logits a verdict is coarse."""
    states, weight = torch.randn(5, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    head = SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=weight)
    every = states.float() @ weight.float().T
    for head_dtype, dtype in ((torch.float32, torch.float32), (None, torch.bfloat16)):
        processor = SimpleNamespace(answers=[6, 2], head_dtype=head_dtype)
        found = answers.get_logits.wrapper(pytest.fail, processor, states, head, None)
        assert found.dtype == dtype
        is_exact = torch.allclose(found.float(), every[:, [6, 2]], atol=1e-6)
        assert is_exact == (dtype == torch.float32)


def config_of(ids: list[int]) -> Any:
    return SimpleNamespace(
        additional_config={ANSWERS: ids},
        parallel_config=SimpleNamespace(world_size=1),
        use_v2_model_runner=False,
    )


def sampled(wanted: dict[int, list[int]], logits: torch.Tensor, ids: list[int]) -> Any:
    batch = SimpleNamespace(sampling_metadata=SimpleNamespace(logprob_token_ids=wanted))
    runner = SimpleNamespace(vllm_config=config_of(ids), input_batch=batch)
    return answers.sample.wrapper(lambda *_: "vLLM's", runner, logits, None)


def test_only_two_answers_are_sampled_here_and_who_wants_other_tokens_is_an_error() -> None:
    for logits, ids in ((torch.zeros(1, 16), [7, 9]), (torch.zeros(1, 2), [])):
        assert sampled({0: [7, 9]}, logits, ids) == "vLLM's"
    for wanted in ({0: [7, 9], 1: [7, 8]}, {0: [7, 9]}, {}):
        with pytest.raises(RuntimeError, match=ANSWERS):
            sampled(wanted, torch.zeros(2, 2), [7, 9])


def test_elsewhere_the_whole_vocabulary_is_computed(monkeypatch: MonkeyPatch) -> None:
    config = config_of([7, 9])
    assert answers._answers_of(config) == [7, 9]
    for part, name, value in (
        (config.parallel_config, "world_size", 2),
        (config, "use_v2_model_runner", True),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(part, name, value)
            assert answers._answers_of(config) == []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert answers._answers_of(config) == []


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
