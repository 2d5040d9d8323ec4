"""A decoder's sizes, counted from its configuration: parameters, bytes, operations.

The arithmetic is that of Qwen3's and Llama's layers: grouped attention, a gated MLP of three
projections, norms. Knows nothing of devices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.recipe import Recipe

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class DecoderShape(Strict):
    """The sizes of a decoder's layers, from its config.json.

    `has_head_norms`: whether q and k are normalised, as in Qwen3.
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = True
    has_head_norms: bool = True

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The projections of a layer by name: the widths of what each reads and writes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads = self.num_attention_heads * self.head_dim
        key_values = self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (hidden, heads),
            "k_proj": (hidden, key_values),
            "v_proj": (hidden, key_values),
            "o_proj": (heads, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def layer_weights(self) -> int:
        """The number of weights in a layer's projections; each multiplies every token once."""
        return sum(reads * writes for reads, writes in self.projections.values())

    @property
    def weights(self) -> int:
        """The number of all parameters; an output layer tied to the embedding counts once."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_head_norms else 0)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_hidden_layers * (self.layer_weights + norms)
        return layers + embeddings + self.hidden_size

    @property
    def key_value_width(self) -> int:
        """How many numbers one token's keys and values have in all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def adapter_tensors(self, rank: int, targets: Sequence[str]) -> list[int]:
        """The number of weights in each A and B of a low-rank adapter of these projections.

        Raises GuardError for other projections.
        """
        of_a_layer: list[int] = []
        for name in targets:
            if name not in self.projections:
                remedy = f"Known: {', '.join(self.projections)}"
                raise GuardError("no such projection", got=name, remedy=remedy)
            of_a_layer += [rank * side for side in self.projections[name]]
        return self.num_hidden_layers * of_a_layer

    def token_flops(self) -> float:
        """The operations of a token in the projections: two a weight."""
        return 2.0 * self.num_hidden_layers * self.layer_weights

    def pair_flops(self) -> float:
        """The operations of a token and one that it attends to: scores and values, two each."""
        return 4.0 * self.num_hidden_layers * self.num_attention_heads * self.head_dim


def shape_of(recipe: Recipe) -> DecoderShape:
    """The shape of a recipe's base, from the config.json in its folder.

    Raises GuardError where the base is not a folder, or is no decoder of this kind.
    """
    path = Path(recipe.base_path) / "config.json"
    where = f"recipe {recipe.name}: base"
    if not path.is_file():
        remedy = "State the base's `shape` in the plan, from its config.json"
        raise GuardError("the base is not in the checkout", where=where, got=path, remedy=remedy)
    config = json.loads(path.read_text(encoding="utf-8"))
    heads = config.get("num_attention_heads")
    missing = [name for name in DecoderShape.model_fields if name not in config]
    unknown = sorted(set(missing) - {"head_dim", "has_head_norms", "tie_word_embeddings"})
    if unknown or recipe.is_encoder:
        remedy = "Plan with a decoder; an encoder is measured by `make bench NAME=encoder`"
        raise GuardError("no decoder of Qwen3's kind", where=where, got=recipe.kind, remedy=remedy)
    sizes = {name: config[name] for name in DecoderShape.model_fields if name in config}
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    has_norms = str(config.get("model_type", "")).startswith("qwen3")
    return DecoderShape(**{**sizes, "head_dim": head_dim, "has_head_norms": has_norms})


def adapter_targets(recipe: Recipe, method: str) -> tuple[str, ...]:
    """The projections that a method's adapters change, according to the recipe."""
    targets = recipe.settings(method).lora.get("target_modules", PROJECTIONS)
    return PROJECTIONS if targets == "all-linear" else tuple(targets)


def adapter_rank(recipe: Recipe, method: str) -> int:
    """The rank of a method's adapters, according to the recipe; PEFT's default is 8."""
    return int(recipe.settings(method).lora.get("r", 8))
