"""DeBERTa-v3, which vLLM has not, with adapters: He et al. 2021, arXiv 2111.09543.

Attention is disentangled: beside its content each token is scored by its distance to the other, by
a table of distances that goes through the same projections as the tokens. So a table belongs to an
adapter as much as a token does: it is projected once for each adapter of a step, with that
adapter's low-rank product, never with that of whichever token asks.

Linear layers see vLLM's flat tokens, which vLLM wraps for adapters; attention sees padded rows
(`rows.py`). Modules are named as in transformers' DebertaV2ForTokenClassification, so
PEFT's names are the names here. Remove when vLLM has the model.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DebertaV2Config
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
from vllm.config import VllmConfig
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.attention import EncoderOnlyAttention
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.tokwise import AllPool, TokenPooler
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.interfaces_base import attn_type, default_pooling_type
from vllm.model_executor.models.utils import AutoWeightsLoader

from .rows import PaddedRows, bounds, padded_rows

BASE_SLOT = -1  # of a token without an adapter
TERMS = 3  # of a score: content by content, content by the other's distance, and the reverse
UNUSED = ("position_ids", "position_embeddings")  # old checkpoints hold them whatever they use


@dataclass(frozen=True)
class RowBlock:
    """Rows with what they share in all layers. `tables`: of each row, which of the step's tables
    is its adapter's, [rows]. `to_key`, `to_query`: the place in the table of each pair of tokens,
    [longest, longest], by query and key and by key and query.
    """

    rows: PaddedRows
    tables: Tensor
    to_key: Tensor
    to_query: Tensor


@dataclass(frozen=True)
class Step:
    """The sequences of a step, the adapter slots among them, and the table of distances
    [positions, hidden size], the same for all layers.
    """

    blocks: Sequence[RowBlock]
    slots: Sequence[int]
    table: Tensor


def linear(inputs: int, outputs: int, prefix: str) -> ReplicatedLinear:
    """A layer that takes adapters, whole on every device."""
    return ReplicatedLinear(inputs, outputs, prefix=prefix, return_bias=False)


def projected(layer: nn.Module, table: Tensor, slots: Sequence[int]) -> Tensor:
    """The table through a layer under the adapter in each slot, [slots, positions, outputs]."""
    base: Tensor = getattr(layer, "base_layer", layer)(table)
    if not isinstance(layer, BaseLinearLayerWithLoRA):
        return base.expand(len(slots), -1, -1)
    tables: list[Tensor] = []
    for slot in slots:
        if slot == BASE_SLOT:
            tables.append(base)
            continue
        a, b = layer.lora_a_stacked[0][slot, 0], layer.lora_b_stacked[0][slot, 0]
        tables.append(base + (table @ a.mT) @ b.mT)
    return torch.stack(tables)


def furthest_of(config: DebertaV2Config) -> int:
    """The distance from which on all count as one."""
    if config.max_relative_positions < 1:
        return int(config.max_position_embeddings)
    return int(config.max_relative_positions)


class SelfAttention(nn.Module):
    """Disentangled attention of each sequence in itself."""

    def __init__(self, config: DebertaV2Config, prefix: str) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.scale = 1 / math.sqrt(size // self.heads * TERMS)
        self.query_proj = linear(size, size, f"{prefix}.query_proj")
        self.key_proj = linear(size, size, f"{prefix}.key_proj")
        self.value_proj = linear(size, size, f"{prefix}.value_proj")

    def forward(self, states: Tensor, step: Step) -> Tensor:
        """[tokens, hidden size] -> the same."""
        query, key = self.query_proj(states), self.key_proj(states)
        value = self.value_proj(states)
        key_tables = self._by_head(projected(self.key_proj, step.table, step.slots))
        query_tables = self._by_head(projected(self.query_proj, step.table, step.slots))
        mixed = torch.zeros_like(query)  # the tail's tokens stay as they are
        for block in step.blocks:
            rows = block.rows
            queries, keys = self._by_head(rows.of(query)), self._by_head(rows.of(key))
            scores = queries @ keys.mT
            by_distance = queries @ key_tables[block.tables].mT
            scores += by_distance.gather(-1, block.to_key.expand_as(scores))
            by_distance = keys @ query_tables[block.tables].mT
            scores += by_distance.gather(-1, block.to_query.expand_as(scores)).mT
            scores *= self.scale
            scores.masked_fill_(~rows.is_token[:, None, None], -math.inf)
            heads = scores.softmax(-1) @ self._by_head(rows.of(value))
            rows.put(mixed, heads.transpose(1, 2).flatten(2))
        return mixed

    def _by_head(self, rows: Tensor) -> Tensor:
        """[rows, length, hidden size] -> [rows, heads, length, head size]."""
        by_head: Tensor = rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return by_head


class Output(nn.Module):
    """A linear layer, what it is added to, and their norm."""

    def __init__(self, config: DebertaV2Config, inputs: int, prefix: str) -> None:
        super().__init__()
        self.dense = linear(inputs, config.hidden_size, f"{prefix}.dense")
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, states: Tensor, residual: Tensor) -> Tensor:
        """[tokens, inputs] and [tokens, hidden size] -> [tokens, hidden size]."""
        normed: Tensor = self.LayerNorm(self.dense(states) + residual)
        return normed


class Attention(nn.Module):
    """Attention with its output."""

    def __init__(self, config: DebertaV2Config, prefix: str) -> None:
        super().__init__()
        self.self = SelfAttention(config, f"{prefix}.self")
        self.output = Output(config, config.hidden_size, f"{prefix}.output")

    def forward(self, states: Tensor, step: Step) -> Tensor:
        """[tokens, hidden size] -> the same."""
        attended: Tensor = self.output(self.self(states, step), states)
        return attended


class Intermediate(nn.Module):
    """The wide layer of a feed-forward block."""

    def __init__(self, config: DebertaV2Config, prefix: str) -> None:
        super().__init__()
        self.dense = linear(config.hidden_size, config.intermediate_size, f"{prefix}.dense")
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """[tokens, hidden size] -> [tokens, intermediate size]."""
        wide: Tensor = self.activation(self.dense(states))
        return wide


class DebertaLayer(nn.Module):
    """Attention and a feed-forward block."""

    def __init__(self, config: DebertaV2Config, prefix: str) -> None:
        super().__init__()
        self.attention = Attention(config, f"{prefix}.attention")
        self.intermediate = Intermediate(config, f"{prefix}.intermediate")
        self.output = Output(config, config.intermediate_size, f"{prefix}.output")

    def forward(self, states: Tensor, step: Step) -> Tensor:
        """[tokens, hidden size] -> the same."""
        attended = self.attention(states, step)
        transformed: Tensor = self.output(self.intermediate(attended), attended)
        return transformed


class Embeddings(nn.Module):
    """Words and their norm."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, words: Tensor) -> Tensor:
        """[tokens, hidden size] -> the same."""
        normed: Tensor = self.LayerNorm(words)
        return normed


class Encoder(nn.Module):
    """The layers, and the table of distances that they share."""

    def __init__(self, config: DebertaV2Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            self.layer.append(DebertaLayer(config, f"{prefix}.layer.{index}"))
        self.rel_embeddings = nn.Embedding(2 * config.position_buckets, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, embedded: Tensor, starts: Sequence[int]) -> Tensor:
        """[tokens, hidden size] and where sequences begin and the last ends -> states alike."""
        step = self._step(starts, embedded.device)
        states = embedded
        for layer in self.layer:
            states = layer(states, step)
        return states

    def _step(self, starts: Sequence[int], device: torch.device) -> Step:
        slot_of = self._slots(starts)
        slots = sorted(set(slot_of))
        rows = padded_rows(starts, 2 * self.config.position_buckets, device)
        blocks: list[RowBlock] = []
        for block in rows:
            tables = [slots.index(slot_of[sequence]) for sequence in block.sequences]
            to_key, to_query = self._places(block.tokens)
            blocks.append(RowBlock(block, torch.tensor(tables, device=device), to_key, to_query))
        return Step(blocks, slots, self.LayerNorm(self.rel_embeddings.weight))

    def _places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where each pair of tokens of a row stands in the table, by transformers' own rule."""
        span = self.config.position_buckets
        row = tokens.mT  # [longest, rows]: only its length is read
        distances = build_relative_position(row, row, span, furthest_of(self.config))[0]
        to_key = (distances + span).clamp(0, 2 * span - 1)
        return to_key, (span - distances).clamp(0, 2 * span - 1)

    def _slots(self, starts: Sequence[int]) -> list[int]:
        """The slot of each sequence's adapter: that of its first token."""
        for module in self.modules():
            if isinstance(module, BaseLayerWithLoRA):
                slots: list[int] = module.punica_wrapper.token_lora_indices[starts[:-1]].tolist()
                return slots
        return [BASE_SLOT] * (len(starts) - 1)


class Deberta(nn.Module):
    """Embeddings and encoder, named as in transformers' DebertaV2Model."""

    def __init__(self, config: DebertaV2Config, prefix: str, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config, f"{prefix}.encoder")
        # Never called: for its layer vLLM says where the sequences of a step begin.
        self.bounds = EncoderOnlyAttention(1, 64, 1.0, prefix=f"{prefix}.bounds")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids [tokens] -> their words [tokens, hidden size]."""
        words: Tensor = self.embeddings.word_embeddings(input_ids)
        return words

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None
    ) -> Tensor:
        """The states of a step's tokens, [tokens, hidden size]."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        starts = bounds(self.bounds.layer_name, len(positions), self.max_tokens)
        states: Tensor = self.encoder(self.embeddings(inputs_embeds), starts)
        return states


def without_unused(
    weights: Iterable[tuple[str, Tensor]], names: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's weights without those that old ones hold and a model with `names` has not."""
    for name, weight in weights:
        if name in names or not any(part in name for part in UNUSED):
            yield name, weight


@attn_type("encoder_only")
@default_pooling_type(tok_pooling_type="ALL")
class DebertaForGuarding(nn.Module, SupportsLoRA):
    """DeBERTa without a head: [tokens, hidden size] for each request, of vLLM's task `token_embed`.
    An adapter's modules are named as in transformers' `DebertaV2ForTokenClassification`.
    """

    is_pooling_model = True
    lora_skip_prefixes: ClassVar[list[str]] = ["classifier."]  # the caller applies it

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        max_tokens = vllm_config.model_config.max_model_len
        config: Any = self.config
        self.deberta = Deberta(config, "deberta", max_tokens)
        self.pooler = DispatchPooler({"token_embed": TokenPooler(AllPool())})

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids [tokens] -> their words [tokens, hidden size]."""
        return self.deberta.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The states of a step's tokens, [tokens, hidden size]."""
        states: Tensor = self.deberta(input_ids, positions, inputs_embeds)
        return states

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """A checkpoint of any of transformers' models of it; heads are left out."""
        renamed_weights: list[tuple[str, Tensor]] = []
        for name, weight in weights:
            if name.startswith(("embeddings.", "encoder.")):  # of a model without a head
                name = f"deberta.{name}"
            if name.startswith("deberta."):
                renamed_weights.append((name, weight))
        names = dict(self.named_parameters())
        loaded: set[str] = AutoWeightsLoader(self).load_weights(
            without_unused(renamed_weights, names)
        )
        return loaded
