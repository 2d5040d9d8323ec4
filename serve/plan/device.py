"""A device that is not here: the time of a step, computed from its operations and bytes.

A decoder's sizes are counted from its configuration: Qwen3's and Llama's layers, with grouped
attention, a gated MLP of three projections, and norms. A step takes the longer of the times for
computing and for reading memory. The host's time for each step and rule comes on top, as far as the
device does not hide it. Knows nothing of queues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, Field

from guard.errors import GuardError
from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped
from guard.recipe import Recipe

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Finite(Strict):
    """Strict, and no number is infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


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
    sizes = {name: config[name] for name in DecoderShape.model_fields if name in config}
    needed = {name for name, key in DecoderShape.model_fields.items() if key.is_required()}
    if recipe.is_encoder or not needed - {"head_dim"} <= set(sizes):
        remedy = "Plan with a decoder; an encoder is measured by `make bench NAME=encoder`"
        raise GuardError("no decoder of Qwen3's kind", where=where, got=recipe.kind, remedy=remedy)
    if not sizes.get("head_dim"):
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    sizes["has_head_norms"] = str(config.get("model_type", "")).startswith("qwen3")
    return DecoderShape(**sizes)


def adapter_targets(recipe: Recipe, method: str) -> tuple[str, ...]:
    targets = recipe.settings(method).lora.get("target_modules", PROJECTIONS)
    return PROJECTIONS if targets == "all-linear" else tuple(targets)


def adapter_rank(recipe: Recipe, method: str) -> int:
    return int(recipe.settings(method).lora.get("r", 8))


DEVICES = HOME / "recipes" / "devices"
TERA, GIGA = 1e12, 1e9


@dataclass
class StepWork:
    """The work of one step, or of several together, as the simulation counts it.

    `adapted`: tokens under an adapter. `pairs`: pairs of a token and one that it attends to.
    `reads`: tokens of earlier context that the step's sequences read, counted for each sequence.
    """

    steps: int = 0
    tokens: int = 0
    adapted: int = 0
    pairs: float = 0.0
    reads: int = 0
    sequences: int = 0
    swap_ins: int = 0
    loads: int = 0

    def add(self, addend: StepWork) -> None:
        for name in vars(addend):
            setattr(self, name, getattr(self, name) + getattr(addend, name))


SHOWN = {
    "step": StepWork(steps=1),
    "1,000 tokens": StepWork(tokens=1000),
    "M pairs": StepWork(pairs=1e6),
    "a rule": StepWork(sequences=1),
    "swap-in": StepWork(swap_ins=1),
    "disk": StepWork(loads=1),
}


def shown_ms(step_ms: Callable[[StepWork], float]) -> dict[str, float]:
    """The times of the pieces of a step that tables show."""
    return {name: step_ms(work) for name, work in SHOWN.items()}


class Device(Finite):
    """The content of `recipes/devices/<name>.yaml`. Each `source` says where its figures are from.

    `compute_share`, `memory_share`: the assumed shares of the peaks that a step reaches.
    `host_…`: the time that Python takes beside the model.
    `host_to_device_gb_s`, `disk_gb_s`: how fast an adapter is copied, and read from disk.
    """

    name: str
    source: str
    peak_tflops: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    memory_gib: float = Field(gt=0)
    workspace_gib: float = Field(default=3.0, ge=0)
    compute_share: float = Field(default=0.5, gt=0, le=1)
    memory_share: float = Field(default=0.7, gt=0, le=1)
    host_step_ms: float = Field(ge=0)
    host_rule_ms: float = Field(ge=0)
    host_check_ms: float = Field(default=0.4, ge=0)
    host_token_us: float = Field(default=2.0, ge=0)
    host_source: str
    host_to_device_gb_s: float = Field(gt=0)
    disk_gb_s: float = Field(gt=0)
    price_an_hour: float = Field(gt=0)
    price_source: str


def load_device(name: str) -> Device:
    """The device of this name. Raises a GuardError that names the known devices."""
    return load(own_or_shipped(DEVICES / f"{name}.yaml"), Device)


@dataclass(frozen=True)
class ComputedCost:
    """The times of one method's steps on a device. `width`: the bytes of a number."""

    device: Device
    shape: DecoderShape
    width: int
    adapter_weights: int
    wake_ms = 0.0

    def step_ms(self, work: StepWork) -> float:
        """The time of steps of this work, with the copies and loads of their adapters."""
        device_s = max(self.compute_s(work), self.memory_s(work))
        host_ms = work.steps * self.device.host_step_ms + work.sequences * self.device.host_rule_ms
        return 1000 * (device_s + self.swap_s(work)) + host_ms

    def compute_s(self, work: StepWork) -> float:
        """The time of all products, at the assumed share of the peak."""
        flops = work.tokens * self.shape.token_flops() + work.pairs * self.shape.pair_flops()
        flops += work.adapted * 2.0 * self.adapter_weights
        return flops / (self.device.peak_tflops * TERA * self.device.compute_share)

    def memory_s(self, work: StepWork) -> float:
        """The time to read the base's weights, each rule's adapter, and earlier keys and values.

        vLLM has no cascade attention there: each rule reads the conversation's keys and values.
        """
        numbers = work.steps * self.shape.weights + work.sequences * self.adapter_weights
        numbers += work.reads * self.shape.key_value_width
        bandwidth = self.device.memory_gb_s * GIGA * self.device.memory_share
        return numbers * self.width / bandwidth

    def swap_s(self, work: StepWork) -> float:
        """The time of copies into slots and reads from disk; none of it is hidden."""
        size = self.adapter_weights * self.width
        copied = work.swap_ins * size / (self.device.host_to_device_gb_s * GIGA)
        return copied + work.loads * size / (self.device.disk_gb_s * GIGA)

    def submit_ms(self, tokens: int, rules: int) -> float:
        """The time to put a check into the engine, without its rules: see `host_rule_ms`."""
        return self.device.host_check_ms + self.device.host_token_us * tokens / 1000
