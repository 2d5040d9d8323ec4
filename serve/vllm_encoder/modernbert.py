"""ModernBERT as vLLM has it, with the states that a token classifier reads, and with adapters that
bring a classifier along.

vLLM's `ModernBertForTokenClassification` takes no adapters; its `ModernBertModel` does, refuses
those with a head, and lacks the prediction head, a dense layer that stands before the classifier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.tokwise import AllPool, TokenPooler
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.interfaces_base import attn_type, default_pooling_type
from vllm.model_executor.models.modernbert import ModernBertModel, ModernBertPredictionHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper


@attn_type("encoder_only")
@default_pooling_type(tok_pooling_type="ALL")
class ModernBertForGuarding(nn.Module, SupportsLoRA):
    """ModernBERT up to its classifier: [tokens, hidden size] for each request, of vLLM's task
    `token_embed`. An adapter's modules are named as in transformers'
    `ModernBertForTokenClassification`.
    """

    is_pooling_model = True
    packed_modules_mapping = ModernBertModel.packed_modules_mapping
    lora_skip_prefixes: ClassVar[list[str]] = ["classifier."]  # the caller applies it
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.layers.": "model.encoder_layer.layers."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        base: Any = ModernBertModel  # abstract by its annotations alone
        self.model = base(vllm_config=vllm_config, prefix="model")
        self.head = ModernBertPredictionHead(self.config)
        size = self.config.hidden_size
        dense: Any = ReplicatedLinear(  # vLLM's own takes no adapter
            size, size, bias=self.config.classifier_bias, prefix="head.dense", return_bias=False
        )
        self.head.dense = dense
        self.pooler = DispatchPooler({"token_embed": TokenPooler(AllPool())})

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids [tokens] -> their embeddings [tokens, hidden size]."""
        embedded: Tensor = self.model.embed_input_ids(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The states of a step's tokens, [tokens, hidden size]."""
        hidden = self.model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
        )
        states: Tensor = self.head(hidden)
        return states

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """A checkpoint of a ModernBERT with its prediction head, as the pretrained ones are."""
        served_weights = [
            (name, weight) for name, weight in weights if name.startswith(("model.", "head."))
        ]
        loaded: set[str] = AutoWeightsLoader(self).load_weights(served_weights)
        return loaded
