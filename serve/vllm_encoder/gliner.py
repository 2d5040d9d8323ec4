"""GLiNER2's classification on DeBERTa: Zaratiana et al. 2025, arXiv 2507.18546.

A prompt begins with its schema, a marker before each label; the classifier reads the state of each
marker, a logit a label. Whoever makes the prompt knows where the markers stand and says so with the
request (`LABEL_POSITIONS`). Spans, relations and counts, which GLiNER2 has heads for too, are not
served. Remove when vLLM has the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.tokwise import AllPool, TokenPooler
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.interfaces_base import attn_type, default_pooling_type
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.pool.metadata import PoolingMetadata

from .deberta import Deberta, linear, without_unused

LABEL_POSITIONS = "label_positions"  # in PoolingParams.extra_kwargs: of the labels' markers


class LabelPool(AllPool):
    """The rows of each request at its labels; all rows of a request that names no labels."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Any]:
        """[tokens, 1] -> [labels, 1] for each request."""
        request_logits = super().forward(hidden_states, pooling_metadata)
        at_labels: list[Any] = []
        for logits, params in zip(request_logits, pooling_metadata.pooling_params, strict=True):
            positions = (params.extra_kwargs or {}).get(LABEL_POSITIONS)
            if logits is not None and positions is not None:
                logits = logits[torch.tensor(positions, device=logits.device)]
            at_labels.append(logits)
        return at_labels


@attn_type("encoder_only")
@default_pooling_type(tok_pooling_type="ALL")
class GlinerForClassification(nn.Module, SupportsLoRA):
    """GLiNER2's logits, [labels, 1] for each request, of vLLM's task `token_embed`. An adapter's
    modules are named as in gliner2's span extractor: those of its encoder, and its classifier's two
    layers.
    """

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        config: Any = self.config
        size = config.hidden_size
        self.encoder = Deberta(config, "encoder", vllm_config.model_config.max_model_len)
        # On all tokens, a few per cent of the work, so that adapters act as in any other layer.
        self.classifier = nn.Sequential(
            linear(size, 2 * size, "classifier.0"), nn.ReLU(), linear(2 * size, 1, "classifier.2")
        )
        self.pooler = DispatchPooler({"token_embed": TokenPooler(LabelPool())})

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids [tokens] -> their words [tokens, embedding size]."""
        return self.encoder.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """What the classifier says at each of a step's tokens, [tokens, 1]."""
        logits: Tensor = self.classifier(self.encoder(input_ids, positions, inputs_embeds))
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """A checkpoint of gliner2's span extractor; its other heads are left out."""
        parameters = dict(self.named_parameters())
        served_weights: list[tuple[str, Tensor]] = []
        for name, weight in without_unused(weights, parameters):
            if name.startswith(("encoder.", "classifier.")):
                served_weights.append((name, weight))
        loaded: set[str] = AutoWeightsLoader(self).load_weights(served_weights)
        return loaded
