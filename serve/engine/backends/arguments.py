"""vLLM's EngineArgs for a recipe and the adapters it serves, and how memory is shared in them. From
the weakest to the strongest: `DEFAULTS`, what a guard engine is; the base, its dtype and the
recipe's context; the recipe's `engine` section; the caller's overrides. Some arguments follow from
these and from the adapters, each where it is computed. What would fail or be wrong is refused
before anything starts. Imports no vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from guard.errors import GuardError
from guard.machine.device import installed_device, missing_for_compiling
from guard.recipe import DEFAULT_MAX_RANK, EIGHT_BITS, Recipe, ServingMemory
from serve.engine.adapter import ServableAdapter

GIB = 2**30
NO_CACHE_BYTES = 2**20  # for an encoder: without a figure vLLM asks for most of the memory
SPARE_TOKENS = 64  # spare tokens of the cache: blocks are whole, and one is not used
# transformers' type of an encoder, as KINDS in guard/recipe.py has them -> the model that
# serve/vllm_encoder registers with vLLM.
ENCODERS = {
    "bert": "BertForGuarding",
    "roberta": "RobertaForGuarding",
    "xlm-roberta": "RobertaForGuarding",
}
# GPU memory beside weights, slots, keys and values: activations, captured graphs, kernels. An
# engine of Qwen3-4B's shape on an H100, with steps of 16,384 tokens and no graphs, took 3.1 GiB.
WORKSPACE_BYTES = 4 * GIB
ALL_ADAPTERS = 1_000_000  # more than there are; vLLM takes memory only for those that exist
LARGEST_SHARE = 0.92  # of a GPU's memory, vLLM's own
BYTES = {"int8": 1.0, "fp8": 1.0, "nf4": 0.5}  # of a quantised weight

DEFAULTS: dict[str, Any] = {
    "enable_lora": True,  # without adapters too: heads need none, and one may be added later
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,  # prompts are token ids, answers are logits
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "scheduling_policy": "priority",  # by virtual time, see `FairQueue`
    # A step ends before the next begins, so what a failed one leaves behind can be cleared away.
    "async_scheduling": False,
    "seed": 0,
}


def stated_args(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments from defaults, recipe and caller, before any follow from the adapters."""
    base = {
        "model": recipe.served_path,
        "revision": recipe.commit,
        "dtype": recipe.serving_dtype,
        "max_model_len": recipe.context_tokens,
    }
    if recipe.serving_quantization == "nf4":
        base |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    return {**DEFAULTS, **base, **recipe.engine, **overrides}


def engine_args(
    recipe: Recipe, adapters: Sequence[ServableAdapter], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of an engine that serves `adapters`. Raises GuardError where the recipe's
    `serving_memory` is too little, or a layer that it has to count does not exist.
    """
    args = stated_args(recipe, overrides)
    _refuse_what_fails_later(recipe, args)
    # A verdict is a difference of two logits, which a bfloat16 output layer rounds to as much as an
    # eighth of a nat.
    args["hf_overrides"] = {"head_dtype": "float32"} | dict(args.get("hf_overrides") or {})
    if "lora_target_modules" not in overrides:
        args.update(_prepared_layers(args, adapters))
    if recipe.serving_memory != ServingMemory():
        args = {**_from_memory(recipe, args, len(adapters)), **args}
    _complete(args)
    return args


def encoder_args(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an engine with an encoder. Raises GuardError for what would fail."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    recipe.check_model_type(config)
    return _window_args(recipe, overrides, ENCODERS[config.model_type])


def _window_args(recipe: Recipe, overrides: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Each request is a window, and none is cut. There are no keys and values to share memory."""
    args = {
        **stated_args(recipe, {}),
        "runner": "pooling",
        "max_model_len": recipe.window_tokens,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": NO_CACHE_BYTES,
        **overrides,
    }
    _refuse_what_fails_later(recipe, args)
    if installed_device() == "cuda":  # vLLM's own share would leave no room for another engine
        share = min(WORKSPACE_BYTES / _gpu_memory_bytes(), LARGEST_SHARE)
        args.setdefault("gpu_memory_utilization", share)
    hf_overrides = {"architectures": [architecture]}
    args["hf_overrides"] = hf_overrides | dict(args.get("hf_overrides") or {})
    _complete(args)
    return args


def _complete(args: dict[str, Any]) -> None:
    """Say whether to compile, and how many adapters stay in host memory: all where nobody says, and
    at least one for every slot. What is evicted is read again from its folder.
    """
    if "enforce_eager" not in args and installed_device() == "cpu":
        args["enforce_eager"] = missing_for_compiling() is not None
    host_copies = args.get("max_cpu_loras", ALL_ADAPTERS)
    args["max_cpu_loras"] = max(host_copies, args.get("max_loras", 1))


def _refuse_what_fails_later(recipe: Recipe, args: Mapping[str, Any]) -> None:
    """Raise GuardError for what vLLM takes and then fails at, or answers wrongly with."""
    where, remedy = f"recipe {recipe.name}: engine", "Leave it out"
    if recipe.serving_quantization == "nf4" and find_spec("vllm_bnb_plugin") is None:
        problem, remedy = "vLLM's plugin for bitsandbytes is not installed", "Run `make setup`"
        raise GuardError(problem, where=where, got="serving_quantization: nf4", remedy=remedy)
    if args.get("specialize_active_lora"):
        problem = "vLLM's specialize_active_lora leaves adapters out of captured graphs"
        raise GuardError(f"{problem}: verdicts would be wrong", where=where, remedy=remedy)
    if installed_device() == "cpu" and args.get("fully_sharded_loras"):
        problem = "on a CPU vLLM computes fully sharded adapters for the base's tokens too"
        got = "fully_sharded_loras"
        raise GuardError(f"{problem}: verdicts would be wrong", where=where, got=got, remedy=remedy)
    if installed_device() == "cuda" and args["dtype"] == "float32" and args["enable_lora"]:
        problem = "vLLM's low-rank kernels on a GPU read bfloat16 and float16 only"
        where, remedy = f"recipe {recipe.name}: dtype", "Write `dtype: {cpu: float32, cuda: "
        remedy += "bfloat16}` and train again: thresholds are made in the dtype of training"
        raise GuardError(problem, where=where, got=args["dtype"], remedy=remedy)


def _from_memory(recipe: Recipe, args: Mapping[str, Any], adapters: int) -> dict[str, Any]:
    """What follows from the recipe's `serving_memory`; on a GPU the share of it, weights included,
    since vLLM's own would leave no room for another engine.
    """
    max_rank = args.get("max_lora_rank", DEFAULT_MAX_RANK)
    sizes = sizes_of(recipe, max_rank, args.get("lora_target_modules"))
    slots = args.get("max_loras")
    shared = shared_out(recipe.serving_memory, sizes, adapters, args["max_model_len"], slots)
    if recipe.serving_memory.device_gib is not None and installed_device() == "cuda":
        wanted = sizes.weights + round(recipe.serving_memory.device_gib * GIB) + WORKSPACE_BYTES
        share = wanted / _gpu_memory_bytes()
        shared["gpu_memory_utilization"] = min(share, LARGEST_SHARE)
    return shared


def _gpu_memory_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def _prepared_layers(
    args: Mapping[str, Any], adapters: Sequence[ServableAdapter]
) -> dict[str, list[str]]:
    """The argument that limits slots to the layers that an adapter has, as each takes room in every
    slot; none where an adapter's layers are not known, or none is among those named.
    """
    modules = frozenset[str]().union(*(adapter.modules for adapter in adapters))
    layers = [name for name in args.get("lora_target_modules") or () if name in modules]
    if layers and all(adapter.modules for adapter in adapters):
        return {"lora_target_modules": layers}
    return {}


@dataclass(frozen=True)
class Sizes:
    """Bytes: of a token's keys and values, of an adapter in a slot and on the host, of the base."""

    token: int
    adapter: int
    host_adapter: int
    weights: int


def sizes_of(recipe: Recipe, max_rank: int, targets: Sequence[str] | None) -> Sizes:
    """The sizes of the base and of an adapter on all of `targets`, from the base's architecture.
    Without targets vLLM prepares slots for every layer, embeddings and output layer too. Raises
    GuardError if the base has no layer whose name ends in one of them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    width = getattr(torch, recipe.serving_dtype).itemsize
    with torch.device("meta"):  # shapes only
        model = AutoModelForCausalLM.from_config(config)
    quantization = recipe.serving_quantization or ""
    narrower = width - BYTES.get(quantization, width)
    weights = width * sum(weight.numel() for weight in model.parameters())
    tensors: dict[str, list[int]] = {}  # A [rank, in] and B [out, rank], by a layer's last name
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            continue
        is_whole = isinstance(layer, torch.nn.Embedding) and quantization not in EIGHT_BITS
        if layer is not model.get_output_embeddings() and not is_whole:
            weights -= narrower * layer.weight.numel()
        sides = [max_rank * side * width for side in layer.weight.shape]
        tensors.setdefault(name.rpartition(".")[2], []).extend(sides)
    if unknown := sorted(set(targets or ()) - set(tensors)):
        names, got = ", ".join(sorted(tensors)), f"lora_target_modules: {', '.join(unknown)}"
        remedy = f"With serving_memory, name layers as the base's files do: {names}"
        raise GuardError("no layer of the base has this name", got=got, remedy=remedy)
    adapted_names = set(tensors if targets is None else targets)
    adapted = list(itertools.chain(*(tensors[name] for name in adapted_names)))
    whole_size = config.hidden_size // config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or whole_size
    return Sizes(
        token=2 * config.num_hidden_layers * config.num_key_value_heads * head_size * width,
        adapter=sum(adapted),
        host_adapter=sum(map(_host_bytes, adapted)),
        weights=round(weights),
    )


def _host_bytes(size: int) -> int:
    """What a tensor takes of host memory: PyTorch pins powers of two beside a GPU."""
    if installed_device() == "cpu":
        return size
    return 1 << (size - 1).bit_length()


def shared_out(
    memory: ServingMemory,
    sizes: Sizes,
    adapters: int,
    context_tokens: int,
    slots: int | None = None,
) -> dict[str, Any]:
    """vLLM EngineArgs that fill the memory and not more. `adapters`: how many are served. First one
    conversation of the full context, then slots for adapters: `slots` of them, or at most half of
    what is left and at most one each, and no more than the host has copies; the rest holds
    conversations. Raises GuardError if the device's part does not hold one conversation and the
    slots.
    """
    args: dict[str, Any] = {}
    if memory.host_gib is not None:
        args["max_cpu_loras"] = max(1, round(memory.host_gib * GIB) // sizes.host_adapter)
        adapters = min(adapters, args["max_cpu_loras"])
    if memory.device_gib is not None:
        context_bytes = (context_tokens + SPARE_TOKENS) * sizes.token
        device_bytes = round(memory.device_gib * GIB)
        left_bytes = device_bytes - context_bytes
        if left_bytes < (slots or 1) * sizes.adapter:
            needed = (context_bytes + (slots or 1) * sizes.adapter) / GIB
            room = f"{slots} slots for adapters (max_loras)" if slots else "one adapter"
            problem = f"the memory does not hold a conversation of the recipe's context and {room}"
            got, remedy = f"device_gib: {memory.device_gib}", f"Give at least {needed:.2f}"
            raise GuardError(problem, got=f"serving_memory: {got}", remedy=remedy)
        args["max_loras"] = slots or max(1, min(adapters, left_bytes // 2 // sizes.adapter))
        args["kv_cache_memory_bytes"] = device_bytes - args["max_loras"] * sizes.adapter
    return args
