"""Two columns of the output layer, and the same difference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm_alora import answers
from vllm_alora.answers import ANSWERS

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


def test_logits_of_the_whole_vocabulary_are_sampled_by_vllm() -> None:
    assert sampled({0: [7, 9]}, torch.zeros(1, 16), [7, 9]) == "vLLM's"
    assert sampled({0: [7, 9]}, torch.zeros(1, 2), []) == "vLLM's"


def test_a_request_that_wants_other_tokens_is_an_error() -> None:
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
