"""How to train and serve on one base: `recipes/models/<name>.yaml`, all keys in docs/recipes.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from guard.base_files import downloaded_base, folder_digest, folder_or_hub_id, hub_commit
from guard.errors import GuardError, choose_from
from guard.files.yaml_file import Strict, load_named
from guard.home import HOME, own_or_shipped
from guard.machine.device import INT8_FLAGS, Device, cpu_info, installed_device, multiplies_bfloat16
from guard.made_base import GGUF, first_layers, gguf_file, made_from_gguf
from guard.method import METHODS, ActsFrom
from guard.rule import Reads, Rule, RuleTurn

MODELS = HOME / "recipes" / "models"

Dtype = Literal["float32", "bfloat16", "float16"]
# A decoder answers with a token after a prompt. An encoder reads the conversation alone, and every
# rule has a head of its own on its states.
Kind = Literal["decoder", "encoder"]

# vLLM's EngineArgs by which an engine would compute with another base than the cards name, or by
# rounded weights, keys or values of it.
OF_ANOTHER_BASE = ["model", "revision", "code_revision", "hf_config_path", "quantization"]
OF_ANOTHER_BASE += ["kv_cache_dtype", "load_format", "hf_overrides"]
# What may be said of them all the same.
HARMLESS: dict[str, list[Any]] = {
    "load_format": ["auto", "safetensors"],
    "hf_overrides": [{}, *({"head_dtype": dtype} for dtype in ("model", "half", *get_args(Dtype)))],
}
EIGHT_BITS = ("int8", "fp8")  # in which a base is kept; nf4 is made while it loads
DEFAULT_MAX_RANK = 16  # vLLM's, where the `engine` section states no max_lora_rank


@dataclass(frozen=True)
class BaseKind:
    """How a kind of base reads.

    `acts_from` is from where on a method may act, `rule_turns` what the prompt may say of the rule.
    An encoder reads windows and writes nothing, and is of one of transformers' `model_types`.
    `only_judged_turns`: heads read only the judged speaker's turns.
    """

    acts_from: tuple[ActsFrom, ...]
    rule_turns: tuple[RuleTurn, ...]
    is_encoder: bool = True
    only_judged_turns: bool = False
    model_types: tuple[str, ...] = ()


KINDS: dict[Kind, BaseKind] = {
    "decoder": BaseKind(get_args(ActsFrom), get_args(RuleTurn), is_encoder=False),
    "encoder": BaseKind(
        ("prompt", "output"),
        ("none",),
        only_judged_turns=True,
        model_types=("bert", "roberta", "xlm-roberta"),
    ),
}


class MethodSettings(Strict):
    """A method's settings, passed straight through: `lora` to PEFT's LoraConfig, `trainer` to TRL's
    SFTConfig, `head` to what fits a head. An aLoRA with `head`, and be it empty, begins as the
    frozen base's head and answers by it; with `start: reader` it begins as the recipe's reader. The
    training stage refuses what the method does not read.
    """

    start: Literal["reader"] | None = None
    lora: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict)
    head: dict[str, Any] | None = None
    early_stopping_patience: int | None = Field(default=None, ge=1)  # in evaluations of an encoder
    min_steps: int | None = Field(default=None, ge=1)


class PrefixCacheSize(Strict):
    """GiB that each process that trains aLoRAs may take for keys and values. By default half of the
    memory that is free when it starts: state `host` where several start together.
    """

    device: float | None = Field(default=None, ge=0)  # GPU memory
    host: float | None = Field(default=None, ge=0)


class ServingMemory(Strict):
    """GiB that serving may take beside the base's weights. The recipe's `engine` section wins.

    Without a figure: vLLM's own defaults, and every adapter in host memory. `weights_gib` and
    `gpu_gib` are for `make doctor`, which says before a download whether the base fits.
    """

    weights_gib: float | None = Field(default=None, gt=0)
    device_gib: float | None = Field(default=None, gt=0)  # keys, values, adapters in slots
    gpu_gib: float | None = Field(default=None, gt=0)
    host_gib: float | None = Field(default=None, ge=0)  # adapters to swap in at once


class Recipe(Strict):
    """A base model and everything needed to train, judge and serve on it."""

    name: str
    kind: Kind = "decoder"
    base: str  # a folder, a hub id, package:MODULE/FOLDER, or gguf: and a file
    layers: int | None = Field(default=None, ge=1)  # the first ones of a decoder; all by default
    revision: str | None = None  # of a hub base
    # The file may have a mapping such as {cpu: float32, cuda: bfloat16}: this device's counts; and
    # `fastest`: bfloat16 on a GPU or a CPU that multiplies it, else float32.
    dtype: Dtype
    quantization: Literal["nf4"] | None = None  # of the base in training
    serving_quantization: Literal["int8", "fp8", "nf4"] | None = None  # of the base that answers
    context_tokens: int = Field(ge=128)
    window_tokens: int | None = Field(default=None, ge=16)  # of an encoder
    rule_turn: RuleTurn = "title"
    reader: str | None = None  # the folder of the aLoRA that judges rules without weights
    answer_prefix: str = ""
    trainer: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, MethodSettings] = Field(min_length=1)  # in the order of tables
    prefix_cache_gib: PrefixCacheSize = Field(default_factory=PrefixCacheSize)
    serving_memory: ServingMemory = Field(default_factory=ServingMemory)
    engine: dict[str, Any] = Field(default_factory=dict)  # passed through to vLLM's EngineArgs

    @field_validator("dtype", mode="before")
    @classmethod
    def _of_this_device(cls, dtype: object) -> object:
        if isinstance(dtype, dict):
            devices = get_args(Device)
            if installed_device() not in dtype or not dtype.keys() <= set(devices):
                raise ValueError(f"a dtype for each of {', '.join(devices)}, or one for both")
            dtype = dtype[installed_device()]
        if dtype == "fastest":
            is_fast = installed_device() == "cuda" or multiplies_bfloat16()
            return "bfloat16" if is_fast else "float32"
        return dtype

    @field_validator("engine")
    @classmethod
    def _serves_this_base(cls, engine: dict[str, Any]) -> dict[str, Any]:
        dtype = engine.get("dtype")
        if dtype not in (None, *get_args(Dtype)):
            raise ValueError(f"dtype: one of {', '.join(get_args(Dtype))}, got {dtype!r}")
        for key in OF_ANOTHER_BASE:
            value = engine.get(key)
            if value is not None and value not in HARMLESS.get(key, ()):
                problem = f"{key}: {value!r} would serve another base than the rules were trained"
                raise ValueError(f"{problem} on; name it as `base` and train on it")
        return engine

    @field_validator("methods")
    @classmethod
    def _are_known(cls, methods: dict[str, MethodSettings]) -> dict[str, MethodSettings]:
        for name in methods:
            if name not in METHODS:
                raise ValueError(f"no method '{name}'. {choose_from(name, METHODS)}")
        return methods

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Recipe:
        kind = KINDS[self.kind]
        if kind.is_encoder != (self.window_tokens is not None):
            raise ValueError("window_tokens is required for encoders and not allowed otherwise")
        for name in self.methods:
            if METHODS[name].acts_from not in kind.acts_from:
                raise ValueError(f"no method of `kind: {self.kind}`: {name}")
            self._check_settings(name)
        if self.rule_turn not in kind.rule_turns:
            turns = " or ".join(kind.rule_turns)
            raise ValueError(f"`kind: {self.kind}` needs `rule_turn: {turns}`")
        of_decoders = self.answer_prefix or self.quantization or self.serving_quantization
        if kind.is_encoder and of_decoders:
            raise ValueError("an encoder needs no answer_prefix and no quantization")
        if kind.is_encoder and self.reader is not None:
            raise ValueError("an encoder reads no rule: leave out reader")
        if kind.is_encoder and self.layers is not None:
            raise ValueError("`layers` is for decoders: an encoder reads from its last layer")
        if kind.is_encoder and self.serving_memory != ServingMemory():
            raise ValueError("an encoder keeps no keys and values: leave out serving_memory")
        return self

    @model_validator(mode="after")
    def _has_kernels(self) -> Recipe:
        quantization = self.serving_quantization
        if quantization is None or installed_device() == "cuda":
            return self
        name = f"serving_quantization: {quantization}"
        if quantization != "int8":
            raise ValueError(f"{name} is served on a GPU alone; on a CPU write int8")
        flags = cpu_info("flags").split()
        if INT8_FLAGS.isdisjoint(flags):
            raise ValueError(f"{name} needs a CPU with AVX-VNNI, AVX-512 VNNI or AMX; leave it out")
        if "amx_int8" in flags and self.engine.get("dtype", self.dtype) == "float32":
            raise ValueError(f"{name} by AMX reads bfloat16; write `dtype: bfloat16`")
        return self

    def _check_settings(self, method: str) -> None:
        settings = self.methods[method]
        if settings.early_stopping_patience and self.kind == "decoder":
            raise ValueError(f"{method}: early_stopping_patience is for encoders")
        may_start = self.reader and method == "alora" and settings.head is not None
        if settings.start and not may_start:
            raise ValueError(f"{method}: only an aLoRA with `head` starts as the `reader`")

    def only(self, method: str) -> Recipe:
        return self.model_copy(update={"methods": {method: self.settings(method)}})

    def settings(self, method: str) -> MethodSettings:
        if method not in self.methods:
            problem = "the recipe lists no such method"
            remedy = f"{choose_from(method, self.methods)}; or add a section to the recipe"
            raise GuardError(problem, where=f"{self._where}: methods", got=method, remedy=remedy)
        return self.methods[method]

    def trainer_settings(self, method: str) -> dict[str, Any]:
        return self.trainer | self.settings(method).trainer

    def rule_turn_of(self, method: str) -> RuleTurn:
        """What the prompt of a method says of the rule; what starts as the reader reads as it."""
        settings = self.methods.get(method, MethodSettings())
        return settings.start or self.rule_turn

    @property
    def serving_dtype(self) -> Dtype:
        """Of the base and its adapters: `dtype`, unless `engine` names another. A float32 base is
        served in bfloat16 on a CPU that multiplies it: twice as fast, for logits that are off by
        thousandths of a nat in the median (docs/results/speed.md).
        """
        stated: Dtype | None = self.engine.get("dtype")
        if stated is not None:
            return stated
        on_cpu = installed_device() == "cpu" and not self.is_encoder  # its rules have heads
        if on_cpu and self.dtype == "float32" and multiplies_bfloat16():
            return "bfloat16"
        return self.dtype

    def reads(self, rule: Rule) -> Reads:
        """The turns that a head reads. Of a decoder, whose state is of the whole conversation, they
        are those whose words count.
        """
        if KINDS[self.kind].only_judged_turns or (self.kind == "decoder" and rule.turns == "last"):
            return rule.reads
        return "conversation"

    def check_model_type(self, config: Any) -> None:
        served, got = KINDS[self.kind].model_types, config.model_type
        if got not in served:
            problem = "no rules are served on an encoder of this type"
            remedy = f"Use one of {', '.join(served)}; docs/recipes.md says how to add one"
            raise GuardError(problem, where=f"{self._where}: base", got=got, remedy=remedy)

    def served_as_trained(self) -> Recipe:
        """The recipe served in the dtype of training, unless `engine` names another: a head is
        fitted to the base's exact states.
        """
        dtype = self.engine.get("dtype", self.dtype)
        return self.model_copy(update={"engine": self.engine | {"dtype": dtype}})

    @property
    def trains_on_served_base(self) -> bool:
        return self.quantization == self.serving_quantization

    @property
    def is_encoder(self) -> bool:
        return KINDS[self.kind].is_encoder

    @property
    def adapter_methods(self) -> list[str]:
        return [name for name in self.methods if METHODS[name].is_adapter]

    @property
    def sharing_methods(self) -> list[str]:
        return [name for name in self.adapter_methods if METHODS[name].shares_conversation]

    @property
    def max_rank(self) -> int:
        return int(self.engine.get("max_lora_rank", DEFAULT_MAX_RANK))

    def training_settings(self, method: str) -> dict[str, Any]:
        """What a card says of how its weights were trained."""
        settings = self.settings(method)
        if not METHODS[method].is_adapter:
            return {"dtype": self.dtype, "head": settings.head or {}}
        stated = {"early_stopping_patience", "min_steps", "head"}
        started = {}
        if settings.start and self.reader_folder:
            from guard.weights.card import read_card  # numpy, which recipes do not need

            started = {"start": read_card(self.reader_folder).version}
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "lora": settings.lora,
            "trainer": self.trainer_settings(method),
            **settings.model_dump(include=stated, exclude_none=True),
            **started,
        }

    @property
    def base_path(self) -> str:
        """The folder or hub id of what is loaded, made first where it is made of another base."""
        path = self.source
        if self.base.startswith(GGUF):
            return str(made_from_gguf(Path(path), self.layers, self._where))
        if self.layers is None:
            return path
        commit = hub_commit(path, self.revision, self._where)
        folder = downloaded_base(path, commit, self._where)
        digest = commit or folder_digest(folder, self._where)
        return str(first_layers(folder, digest, self.layers, self._where))

    @property
    def source(self) -> str:
        if self.base.startswith(GGUF):
            return str(gguf_file(self.base, self.revision, MODELS.parent.parent, self._where))
        return folder_or_hub_id(self.base, MODELS.parent.parent, self._where)

    @property
    def reader_folder(self) -> Path | None:
        """Where the reader is. Raises GuardError for a reader that is not there."""
        if self.reader is None:
            return None
        folder = own_or_shipped(MODELS / self.reader)
        if not folder.is_dir():
            remedy = "Put its files there, or take the key out"
            raise GuardError("no reader", where=f"{self._where}: {folder}", remedy=remedy)
        return folder

    @property
    def commit(self) -> str | None:
        return hub_commit(self.base_path, self.revision, self._where)

    @property
    def served_path(self) -> str:
        """The folder or hub id of what answers: the base, or in 8 bits, made first."""
        if self.serving_quantization not in EIGHT_BITS:
            return self.base_path
        from guard.quantized_base import quantized_base  # numpy, which recipes do not need

        base = downloaded_base(self.base_path, self.commit, self._where)
        digest = self.commit or folder_digest(base, self._where)
        return str(quantized_base(base, digest, self.serving_quantization, self._where))

    @property
    def base_revision(self) -> str:
        """What pins the base that answers: the hub commit, or SHA-256 over the files of its folder;
        of a quantised one behind the quantization's name.
        """
        path, quantization = self.served_path, self.serving_quantization
        commit = hub_commit(path, self.revision, self._where)
        revision = commit or folder_digest(Path(path), self._where)
        return f"{quantization}:{revision}" if quantization else revision

    @property
    def _where(self) -> str:
        return f"recipe {self.name}"


def load_recipe(name: str, models: Path = MODELS) -> Recipe:
    return load_named(name, models, Recipe, "name")
