"""BERT as vLLM serves it for embeddings, but with the states of all tokens as they are, and with
adapters that bring a head along.

vLLM's `BertForSequenceClassification` and `BertForTokenClassification` take no adapters; its
`BertEmbeddingModel` does, refuses those with a head, and normalises what it gives out.
"""

from __future__ import annotations

from typing import ClassVar

from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import DispatchPooler, Pooler
from vllm.model_executor.layers.pooler.tokwise import AllPool, TokenPooler
from vllm.model_executor.models.bert import BertEmbeddingModel


class BertForGuarding(BertEmbeddingModel):
    """BERT without a head: [tokens, hidden size] for each request, of vLLM's task `token_embed`. An
    adapter's modules are named as in transformers' `BertForTokenClassification`.
    """

    lora_skip_prefixes: ClassVar[list[str]] = ["classifier."]  # the caller applies it

    def _build_pooler(self, pooler_config: PoolerConfig) -> Pooler:
        return DispatchPooler({"token_embed": TokenPooler(AllPool())})
