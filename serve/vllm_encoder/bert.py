"""BERT, RoBERTa and XLM-RoBERTa as vLLM serves them for embeddings, but with the states of all
tokens as they are, and with adapters that bring a head along.

vLLM's models for classification take no adapters; its embedding models do, refuse those with a
head, and normalise what they give out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor
from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import DispatchPooler, Pooler
from vllm.model_executor.layers.pooler.tokwise import AllPool, TokenPooler
from vllm.model_executor.models.bert import BertEmbeddingModel
from vllm.model_executor.models.roberta import RobertaEmbeddingModel

HEADS = ("lm_head.", "classifier.")  # of a checkpoint: what it was pretrained or trained with


class BertForGuarding(BertEmbeddingModel):
    """BERT without a head: [tokens, hidden size] for each request, of vLLM's task `token_embed`. An
    adapter's modules are named as in transformers' `BertForTokenClassification`.
    """

    lora_skip_prefixes: ClassVar[list[str]] = ["classifier."]  # the caller applies it

    def _build_pooler(self, pooler_config: PoolerConfig) -> Pooler:
        return DispatchPooler({"token_embed": TokenPooler(AllPool())})


class RobertaForGuarding(BertForGuarding, RobertaEmbeddingModel):
    """RoBERTa, as `BertForGuarding`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """A checkpoint of a RoBERTa; its heads are left out."""
        served_weights = [(name, weight) for name, weight in weights if not name.startswith(HEADS)]
        loaded: set[str] = super().load_weights(served_weights)
        return loaded
