"""How to train and serve on one base model: `recipes/models/<name>.yaml`.

Knows nothing of torch or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from guard.base_files import folder_digest, folder_or_hub_id, hub_commit
from guard.errors import GuardError, choose_from
from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped
from guard.machine.device import Device, installed_device, multiplies_bfloat16
from guard.method import METHODS, ActsFrom
from guard.rule import Reads, Rule, RuleTurn

MODELS = HOME / "recipes" / "models"

Dtype = Literal["float32", "bfloat16", "float16"]
# A decoder answers with a token after a prompt. An encoder reads the conversation alone, and every
# rule has a head of its own on its states. GLiNER2 is an encoder that reads the rule too, as a
# label, and has a classifier of labels.
Kind = Literal["decoder", "encoder", "gliner2"]

# vLLM's EngineArgs by which an engine would compute with another base than the cards name, or by
# rounded weights, keys or values of it.
OF_ANOTHER_BASE = (
    *("model", "revision", "code_revision", "hf_config_path", "quantization", "kv_cache_dtype"),
    *("load_format", "hf_overrides"),
)
# What may be said of them all the same: how the base's own weights are read, and in which type the
# output layer computes.
LOAD_FORMATS = ("auto", "safetensors")
HF_OVERRIDES = {"head_dtype"}
DEFAULT_MAX_RANK = 16  # vLLM's, where the `engine` section states no max_lora_rank


@dataclass(frozen=True)
class BaseKind:
    """How a kind of base reads.

    `acts_from` is from where on a method may act, `rule_turns` what the prompt may say of the rule.
    An encoder reads windows and writes nothing, and is of one of transformers' `model_types`, those
    that `serve/vllm_encoder` has a model for. `only_judged_turns`: heads read only the judged
    speaker's turns.
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
        model_types=("bert", "deberta-v2", "modernbert", "roberta", "xlm-roberta"),
    ),
    "gliner2": BaseKind(("prompt",), ("title", "policy"), model_types=("deberta-v2",)),
}


class MethodSettings(Strict):
    """A method's settings, passed straight through.

    `lora` to PEFT's LoraConfig and `trainer` to TRL's SFTConfig, of a method whose weights are an
    adapter; `head` to what fits the weights of one that acts from the output (`train/head/` for
    `head`). The training stage refuses those that the method does not read.
    """

    lora: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict)
    head: dict[str, Any] = Field(default_factory=dict)
    # Training ends after so many epochs without a lower validation loss, and the best epoch's
    # weights are kept; default: it never does. On an encoder these are evaluations, and the
    # weights of the best one are kept in any case.
    early_stopping_patience: int | None = Field(default=None, ge=1)
    # The fewest steps of a training, for rows so few that their epochs have fewer.
    min_steps: int | None = Field(default=None, ge=1)


class PrefixCacheSize(Strict):
    """GiB that each process that trains aLoRAs may take for keys and values.

    The memory in which the model lies holds the adapters' weights too. By default a process takes
    half of the free memory (its share of the host's, if several run there) and no disk.
    """

    device: float | None = Field(default=None, ge=0)  # GPU memory
    host: float | None = Field(default=None, ge=0)
    disk: float = Field(default=0.0, ge=0)


class ServingMemory(Strict):
    """GiB that serving may take beside the base's weights. The recipe's `engine` section wins.

    `device` (GPU, or a CPU engine's own memory) is shared by keys and values and by the adapters in
    device slots; `host` holds adapters that can be swapped in at once, and those that do not fit
    are read from disk. Without a figure: vLLM's own defaults, and every adapter in host memory.
    """

    # The size of the base's weights in the recipe's dtype, so that `make doctor` can say before a
    # download whether they fit; serving itself measures them.
    weights_gib: float | None = Field(default=None, gt=0)
    device_gib: float | None = Field(default=None, gt=0)
    # The least memory of a GPU for all of it: weights, slots, keys and values, and what vLLM takes
    # beside them. For `make doctor` alone.
    gpu_gib: float | None = Field(default=None, gt=0)
    host_gib: float | None = Field(default=None, ge=0)


class Recipe(Strict):
    """A base model and everything needed to train, judge and serve on it."""

    name: str
    kind: Kind = "decoder"
    # A folder (any path; a relative one in CENTURION_HOME or the checkout), a hub id, or
    # package:MODULE/FOLDER.
    base: str
    # For a hub base: a commit, or a branch or tag, which stands for the commit that it names;
    # default: main.
    revision: str | None = None
    # The base's dtype in training, and in serving unless `serving_dtype` differs. The file may have
    # a mapping such as {cpu: float32, cuda: bfloat16}, of which this environment's device counts.
    dtype: Dtype
    # The base's quantization while adapters are trained; they are served on the base in `dtype`.
    quantization: Literal["nf4"] | None = None
    context_tokens: int = Field(ge=128)
    # An encoder reads a conversation in windows of at most so many tokens; GLiNER2's include the
    # rule's schema.
    window_tokens: int | None = Field(default=None, ge=16)
    # What the prompt says of the rule; the bare base as a judge reads the title.
    rule_turn: RuleTurn = "title"
    answer_prefix: str = ""  # between the assistant's header and the verdict token
    trainer: dict[str, Any] = Field(default_factory=dict)  # shared SFTConfig arguments
    methods: dict[str, MethodSettings] = Field(min_length=1)  # in the order of tables
    prefix_cache_gib: PrefixCacheSize = Field(default_factory=PrefixCacheSize)
    serving_memory: ServingMemory = Field(default_factory=ServingMemory)
    engine: dict[str, Any] = Field(default_factory=dict)  # passed through to vLLM's EngineArgs

    @field_validator("dtype", mode="before")
    @classmethod
    def _of_this_device(cls, dtype: object) -> object:
        if not isinstance(dtype, dict):
            return dtype
        device = installed_device()
        devices = get_args(Device)
        unknown = [str(name) for name in dtype if name not in devices]
        if unknown or device not in dtype:
            got = f"unknown: {', '.join(unknown)}" if unknown else f"none for {device}"
            raise ValueError(f"a dtype for each of {', '.join(devices)}, or one for both ({got})")
        return dtype[device]

    @field_validator("engine")
    @classmethod
    def _names_a_dtype(cls, engine: dict[str, Any]) -> dict[str, Any]:
        dtype = engine.get("dtype")
        if dtype not in (None, *get_args(Dtype)):
            raise ValueError(f"dtype: one of {', '.join(get_args(Dtype))}, got {dtype!r}")
        return engine

    @field_validator("engine")
    @classmethod
    def _is_of_this_base(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for key in OF_ANOTHER_BASE:
            value = engine.get(key)
            is_harmless = value is None or (key == "load_format" and value in LOAD_FORMATS)
            if key == "hf_overrides" and isinstance(value, dict):
                is_harmless = value.keys() <= HF_OVERRIDES
            if not is_harmless:
                raise ValueError(
                    f"{key}: {value!r} would serve another base than the rules were trained on; "
                    "name it as `base` and train on it"
                )
        return engine

    @field_validator("methods")
    @classmethod
    def _are_known(cls, methods: dict[str, MethodSettings]) -> dict[str, MethodSettings]:
        for name in methods:
            if name not in METHODS:
                raise ValueError(
                    f"no method '{name}'. {choose_from(name, METHODS)}. A new one is an entry of "
                    "METHODS in guard/method.py and of TRAINERS in train/methods.py"
                )
        return methods

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Recipe:
        kind = KINDS[self.kind]
        if kind.is_encoder != (self.window_tokens is not None):
            raise ValueError("window_tokens is required for encoders and not allowed otherwise")
        for name in self.methods:
            if METHODS[name].acts_from not in kind.acts_from:
                raise ValueError(f"no method of `kind: {self.kind}`: {name}")
        if self.rule_turn not in kind.rule_turns:
            turns = " or ".join(kind.rule_turns)
            raise ValueError(f"`kind: {self.kind}` needs `rule_turn: {turns}`")
        if kind.is_encoder and (self.answer_prefix or self.quantization):
            raise ValueError("an encoder needs no answer_prefix and no quantization")
        if kind.is_encoder and self.serving_memory != ServingMemory():
            raise ValueError("an encoder keeps no keys and values: leave out serving_memory")
        return self

    def only(self, method: str) -> Recipe:
        """The recipe with one of its methods. Raises GuardError for one that it does not list."""
        return self.model_copy(update={"methods": {method: self.settings(method)}})

    def settings(self, method: str) -> MethodSettings:
        """The settings of one method. Raises GuardError where the recipe does not list it."""
        if method not in self.methods:
            raise GuardError(
                "the recipe lists no such method",
                where=f"{self._where}: methods",
                got=method,
                remedy=f"{choose_from(method, self.methods)}; or add a section to the recipe",
            )
        return self.methods[method]

    def trainer_settings(self, method: str) -> dict[str, Any]:
        """The method's SFTConfig arguments: the shared ones, overridden by its own."""
        return self.trainer | self.settings(method).trainer

    @property
    def serving_dtype(self) -> Dtype:
        """The dtype of the base and its adapters in serving: `dtype`, unless `engine` names
        another.

        A float32 base is served in bfloat16 on a CPU that multiplies it: about twice as fast, for
        logits that are off by thousandths of a nat in the median (docs/results/speed.md).
        """
        stated: Dtype | None = self.engine.get("dtype")
        if stated is not None:
            return stated
        on_cpu = installed_device() == "cpu" and not self.is_encoder  # its rules have heads
        if on_cpu and self.dtype == "float32" and multiplies_bfloat16():
            return "bfloat16"
        return self.dtype

    def reads(self, rule: Rule) -> Reads:
        """The turns that weights on this base read for the rule."""
        if KINDS[self.kind].only_judged_turns:
            return rule.reads
        return "conversation"

    def check_model_type(self, model_type: str) -> None:
        """Raise GuardError for an encoder of a type of transformers' that is not served."""
        served = KINDS[self.kind].model_types
        if model_type not in served:
            raise GuardError(
                "no rules are served on an encoder of this type",
                where=f"{self._where}: base",
                got=model_type,
                remedy=f"Use one of {', '.join(served)}, or add a model to serve/vllm_encoder, and "
                "its type to ENCODERS in serve/engine/backends/arguments.py and to KINDS in "
                "guard/recipe.py",
            )

    def served_as_trained(self) -> Recipe:
        """The recipe whose base is served in the dtype of training, unless `engine` names another.

        A head is fitted to the base's exact states: rounded to bfloat16 they move its logit by .3
        nats on average (docs/lessons.md), so an engine with a head among its rules needs it.
        """
        dtype = self.engine.get("dtype", self.dtype)
        return self.model_copy(update={"engine": self.engine | {"dtype": dtype}})

    @property
    def is_encoder(self) -> bool:
        """Whether the base reads windows and writes nothing."""
        return KINDS[self.kind].is_encoder

    @property
    def adapter_methods(self) -> list[str]:
        """The methods whose weights are adapters, in the recipe's order."""
        return [name for name in self.methods if METHODS[name].is_adapter]

    @property
    def sharing_methods(self) -> list[str]:
        """The adapter methods that share conversations between rules, in the recipe's order."""
        return [name for name in self.adapter_methods if METHODS[name].shares_conversation]

    @property
    def sharing_method(self) -> str:
        """The first adapter method that shares conversations. Raises GuardError without one."""
        if not self.sharing_methods:
            raise GuardError(
                "no method of the recipe is an adapter that shares conversations",
                where=self._where,
                got=", ".join(self.methods),
                remedy="Add a section `alora` to its methods",
            )
        return self.sharing_methods[0]

    @property
    def max_rank(self) -> int:
        """The highest rank of an adapter that the engine serves."""
        rank: int = self.engine.get("max_lora_rank", DEFAULT_MAX_RANK)
        return rank

    def training_settings(self, method: str) -> dict[str, Any]:
        """What a card says of how its weights were trained."""
        settings = self.settings(method)
        if not METHODS[method].is_adapter:
            return {"dtype": self.dtype, "head": settings.head}
        budget = settings.model_dump(
            include={"early_stopping_patience", "min_steps"}, exclude_none=True
        )
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "lora": settings.lora,
            "trainer": self.trainer_settings(method),
            **budget,
        }

    @property
    def base_path(self) -> str:
        """The base's local folder if it has one; else its hub id."""
        return folder_or_hub_id(self.base, MODELS.parent.parent, self._where)

    @property
    def commit(self) -> str | None:
        """The hub commit to load the base at; None for a local folder.

        Raises GuardError where neither the hub nor its cache on this machine knows it.
        """
        return hub_commit(self.base_path, self.revision, self._where)

    @property
    def base_revision(self) -> str:
        """What pins the base: the hub commit, or SHA-256 over the files of its folder.

        Raises GuardError where the commit is not known or the folder lacks a file.
        """
        return self.commit or folder_digest(Path(self.base_path), self._where)

    @property
    def _where(self) -> str:
        """The recipe's name in errors."""
        return f"recipe {self.name}"


def load_recipe(name: str, models: Path = MODELS) -> Recipe:
    """The recipe in `models/<name>.yaml`.

    Raises GuardError naming the file, the key and the nearest valid name.
    """
    path = own_or_shipped(models / f"{name}.yaml")
    recipe = load(path, Recipe)
    if recipe.name != name:
        raise GuardError(
            "name differs from the file's name",
            where=path,
            got=recipe.name,
            remedy=f"Write `name: {name}` or rename the file",
        )
    return recipe
