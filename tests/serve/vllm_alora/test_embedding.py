"""An embedding in 8 bits, and an output layer that is tied to it or is not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter, functional
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm_alora.embedding import EightBitEmbedding

from train.rounded import rounded


class Layer(torch.nn.Module):
    """Stands for vLLM's, which need a process group."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight


class OutputLayer(Layer, ParallelLMHead):
    """As `Layer`."""

    def __init__(self, weight: Parameter) -> None:
        torch.nn.Module.__init__(self)
        self.weight = weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_are_those_of_training_in_a_byte_a_number(dtype: torch.dtype, is_tied: bool) -> None:
    whole = torch.randn(50, 16).to(dtype)
    expected, x = rounded(whole, torch.int8), torch.randn(3, 16).to(dtype)
    embedding = Layer(Parameter(whole.clone(), requires_grad=False))
    output = OutputLayer(Parameter(whole.clone(), requires_grad=False))
    method = EightBitEmbedding()
    if is_tied:
        EightBitEmbedding().tie_weights(output, embedding)  # type: ignore[arg-type]
    method.process_weights_after_loading(embedding)
    EightBitEmbedding().process_weights_after_loading(output)
    ids = torch.tensor([[3, 49], [0, 3]])
    assert embedding.weight.dtype == torch.int8
    torch.testing.assert_close(method.embedding(embedding, ids), expected[ids])
    of_output = expected if is_tied else whole
    torch.testing.assert_close(EightBitEmbedding().embedding(output, ids), of_output[ids])
    logits = EightBitEmbedding().apply(output, x)
    torch.testing.assert_close(logits, functional.linear(x, of_output))
