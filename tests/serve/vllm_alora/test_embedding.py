"""An embedding in 8 bits, and an output layer that is tied to it or is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Module, Parameter, functional
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm_alora.embedding import EightBitEmbedding

from train.rounded import rounded

pytestmark = pytest.mark.slow


def layer_of(kind: type[Module], weight: torch.Tensor) -> Any:
    """One of vLLM's, which would want a process group."""
    layer: Any = kind.__new__(kind)
    Module.__init__(layer)
    layer.weight = Parameter(weight.clone(), requires_grad=False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_are_those_of_training_in_a_byte_a_number(dtype: torch.dtype, is_tied: bool) -> None:
    whole, x = torch.randn(50, 16).to(dtype), torch.randn(3, 16).to(dtype)
    embedding, output = (layer_of(it, whole) for it in (VocabParallelEmbedding, ParallelLMHead))
    method, of_output = EightBitEmbedding(), EightBitEmbedding()
    if is_tied:
        of_output.tie_weights(output, embedding)
    method.process_weights_after_loading(embedding)
    of_output.process_weights_after_loading(output)
    assert embedding.weight.dtype == torch.int8
    ids, expected = torch.tensor([[3, 49], [0, 3]]), rounded(whole, torch.int8)
    torch.testing.assert_close(method.embedding(embedding, ids), expected[ids])
    answered = expected if is_tied else whole
    torch.testing.assert_close(of_output.embedding(output, ids), answered[ids])
    torch.testing.assert_close(of_output.apply(output, x), functional.linear(x, answered))
