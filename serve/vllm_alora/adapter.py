"""An adapter folder as it lies on disk, read and checked before an engine sees it. Knows nothing of
requests.

A bad adapter that reaches a worker stops the whole engine, and vLLM drops tensors whose names it
does not expect. So everything that can be known from the files and the model's architecture is
checked here, once per content.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load
from vllm.exceptions import VLLMValidationError
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.platforms import current_platform

from .peft_config import is_adapted, unserved

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_SHOWN = 200  # characters of a value that an error quotes
SAVE_AGAIN = "Save the adapter with PEFT's save_pretrained"


class AdapterError(VLLMValidationError, ValueError):
    """An adapter that cannot be served, with a remedy. One request's error (HTTP 400)."""

    def __init__(self, problem: str, *, where: object, got: object = None, remedy: str) -> None:
        message = f"{where}: {problem}"
        if got is not None:
            message += f" (got {got})"
        super().__init__(f"{message}. {remedy}")


Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class AdapterFiles:
    """What an adapter's files say. `content` is the SHA-256 of both. `invocation` is empty for a
    plain LoRA. `shapes` maps a module's name in the base model to the shapes of its A [rank, in]
    and B [out, rank].
    """

    path: str
    config: PEFTHelper
    invocation: tuple[int, ...]
    content: str
    shapes: Shapes


def read_adapter(path: str) -> AdapterFiles:
    """The adapter in the folder `path`. Raises AdapterError. Cached for as long as neither file
    changes on disk, which two `stat` calls tell.
    """
    stamps = _stamps(path)
    if stamps is None:
        missing = CONFIG if not Path(path, CONFIG).exists() else WEIGHTS
        remedy = "Train it, or name another folder"
        raise AdapterError(f"the adapter has no {missing}", where=path, remedy=remedy)
    return _read(path, stamps)


Stamp = tuple[int, int, int, int]


def _stamps(folder: str) -> tuple[Stamp, ...] | None:
    """What tells versions of the adapter's files apart; None where one is missing."""
    try:
        # A Path takes three times as long to make as the file takes to look up.
        config = os.stat(f"{folder}/{CONFIG}")  # noqa: PTH116
        weights = os.stat(f"{folder}/{WEIGHTS}")  # noqa: PTH116
    except OSError:
        return None
    return (
        # The time of a change of state, since that of a change of content can be set.
        (config.st_mtime_ns, config.st_ctime_ns, config.st_size, config.st_ino),
        (weights.st_mtime_ns, weights.st_ctime_ns, weights.st_size, weights.st_ino),
    )


@functools.lru_cache(maxsize=4096)
def _read(path: str, stamps: tuple[Stamp, ...]) -> AdapterFiles:
    """Read and check the files; `stamps` only tells their versions apart."""
    try:
        config_bytes, weights_bytes = (Path(path, name).read_bytes() for name in (CONFIG, WEIGHTS))
    except OSError as error:
        remedy = "Save it again, or correct the path"
        raise AdapterError(f"cannot be read: {error}", where=path, remedy=remedy) from error
    fields, config = _config(path, config_bytes)
    content = hashlib.sha256(config_bytes)
    content.update(weights_bytes)  # without a copy: an adapter has hundreds of MB
    return AdapterFiles(
        path=path,
        config=config,
        invocation=tuple(config.alora_invocation_tokens or ()),
        content=content.hexdigest(),
        shapes=_shapes(path, fields, config, weights_bytes),
    )


def _config(path: str, content: bytes) -> tuple[dict[str, Any], PEFTHelper]:
    """The fields of the configuration, and what vLLM makes of them."""
    where = Path(path, CONFIG)
    try:
        fields = json.loads(content)
        config = PEFTHelper.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        problem = f"not a LoRA configuration: {error}"
        raise AdapterError(problem, where=where, remedy=SAVE_AGAIN) from error
    kind = fields.get("peft_type")
    if kind != "LORA":
        remedy = "Only LoRA and aLoRA are served"
        raise AdapterError("not a LoRA adapter", where=where, got=kind, remedy=remedy)
    name = unserved(fields)
    if name is not None:
        problem = f"PEFT acts on the adapter's {name}, and the engine does not"
        got = f"{name}: {fields[name]!r}"[:MAX_SHOWN]
        raise AdapterError(problem, where=where, got=got, remedy="Train without it")
    tokens = config.alora_invocation_tokens
    if tokens is not None and not (
        isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
    ):
        problem = "alora_invocation_tokens must be a non-empty list of token ids"
        raise AdapterError(problem, where=where, got=tokens, remedy="Train it again")
    return fields, config


def _shapes(path: str, fields: dict[str, Any], config: PEFTHelper, content: bytes) -> Shapes:
    where = Path(path, WEIGHTS)
    try:
        tensors = load(content)
    except SafetensorError as error:
        problem = f"not a safetensors file: {error}"
        raise AdapterError(problem, where=where, remedy=SAVE_AGAIN) from error
    sides: dict[str, dict[bool, tuple[int, ...]]] = {}  # module -> is it A -> shape
    for name, tensor in tensors.items():
        _check_finite(name, tensor, where)
        if is_base_embedding_weights(name):
            continue  # PEFT saves them next to resized embeddings; vLLM leaves them out on purpose
        module, is_a = _parsed(name, where)
        is_whole_layer = module in (config.modules_to_save or ())
        if not is_whole_layer and ".experts" not in module:  # vLLM checks these
            sides.setdefault(module, {})[is_a] = tuple(tensor.shape)
    if not tensors:
        raise AdapterError("the adapter has no tensors", where=where, remedy=SAVE_AGAIN)
    shapes = {}
    for module, side in sides.items():
        _check_adapted(module, fields, path)
        rank, _ = config.get_rank_and_scaling(module)
        a, b = side.get(True, ()), side.get(False, ())
        if not (len(a) == len(b) == 2 and a[0] == b[1] == rank):
            problem = f"{module} needs A [{rank}, in] and B [out, {rank}]"
            got = f"A {list(a)}, B {list(b)}"
            raise AdapterError(problem, where=where, got=got, remedy=SAVE_AGAIN)
        shapes[module] = (a, b)
    return shapes


def _check_adapted(module: str, fields: dict[str, Any], path: str) -> None:
    """Raise AdapterError for a layer with tensors that PEFT would leave out."""
    where = Path(path, CONFIG)
    try:
        is_left_out = ".experts" not in module and not is_adapted(fields, module)
    except (re.error, TypeError, ValueError) as error:
        problem = f"its layers cannot be told: {error}"
        raise AdapterError(problem, where=where, remedy=SAVE_AGAIN) from error
    if is_left_out:
        problem = "by the configuration PEFT leaves out a layer that has weights"
        raise AdapterError(problem, where=where, got=module, remedy=SAVE_AGAIN)


def _check_finite(name: str, tensor: torch.Tensor, where: Path) -> None:
    if not (tensor.is_floating_point() and torch.isfinite(tensor).all()):
        problem = "a tensor with NaN, infinite or integer values"
        raise AdapterError(problem, where=where, got=name, remedy="Train it again")


def _parsed(name: str, where: Path) -> tuple[str, bool]:
    """The module of a tensor's name, and whether it is A."""
    try:
        module, is_a = parse_fine_tuned_lora_name(name)
    except ValueError as error:
        problem = "a tensor that is no LoRA weight"
        raise AdapterError(problem, where=where, got=name, remedy=SAVE_AGAIN) from error
    return module, is_a


def check_adapter(adapter: AdapterFiles, lora_config: Any, model_config: Any) -> None:
    """Raise AdapterError unless an engine with these settings and this model can serve `adapter`.
    It takes some milliseconds, so it is called once for each content.
    """
    try:
        adapter.config.validate_legal(lora_config)
    except ValueError as error:
        problem, remedy = str(error).rstrip("."), "Change the adapter or the engine's settings"
        raise AdapterError(problem, where=adapter.path, remedy=remedy) from error
    layers = _layers(model_config.hf_config)
    if current_platform.is_cpu():
        _check_cpu(adapter, lora_config, model_config, layers or {})
    if layers is None:
        return
    for module, (a, b) in adapter.shapes.items():
        layer = layers.get(module)
        inputs, outputs = a[1], b[0]
        if layer is None or (inputs, outputs) != (layer.inputs, layer.outputs):
            got = "no such layer"
            if layer is not None:
                model_has = f"{layer.inputs} -> {layer.outputs}"
                got = f"{inputs} -> {outputs}, where the model has {model_has}"
            problem = f"{module} does not fit the base model"
            remedy = "Serve it on the base it was trained on"
            raise AdapterError(problem, where=adapter.path, got=got, remedy=remedy)


class TargetLayer(NamedTuple):
    """A layer that an adapter may target, by its sizes; `is_end`: an embedding, or the output."""

    inputs: int
    outputs: int
    is_end: bool


Layers = Mapping[str, TargetLayer]


def _check_cpu(adapter: AdapterFiles, lora_config: Any, model_config: Any, layers: Layers) -> None:
    """Refuse what vLLM's CPU operator would compute: it gives base tokens the last adapter."""
    dtype = lora_config.lora_dtype
    if dtype != model_config.dtype:
        problem = f"on a CPU adapters are served in the base's type, {model_config.dtype}"
        remedy = "Leave lora_dtype at auto"
        raise AdapterError(problem, where=adapter.path, got=dtype, remedy=remedy)
    ends = [module for module in adapter.shapes if module in layers and layers[module].is_end]
    if ends:
        problem = "on a CPU an adapter of the embedding or the output layer is not served"
        got = ", ".join(ends)
        raise AdapterError(problem, where=adapter.path, got=got, remedy="Train without them")


# A process has a configuration or two, which cannot be hashed.
_layers_of: list[tuple[Any, Layers | None]] = []


def _layers(hf_config: Any) -> Layers | None:
    """`_build_layers`, once per configuration."""
    for built_config, built_layers in _layers_of:
        if built_config is hf_config:
            return built_layers
    layers = _build_layers(hf_config)
    _layers_of.append((hf_config, layers))
    return layers


def _build_layers(hf_config: Any) -> Layers | None:
    """Every layer that an adapter may target, by name. From an instance, without memory, of the
    class that PEFT adapted. None where that class does not settle the names: transformers does not
    have it, or the text model is part of a larger one, whose layers were renamed between versions.
    There the worker's own check (`placed`) has to do.
    """
    architecture = getattr(transformers, (hf_config.architectures or [""])[0], None)
    if architecture is None or hf_config.get_text_config() is not hf_config:
        return None
    with torch.device("meta"):
        model = architecture(hf_config)
    output = model.get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            is_output = module is output
            layers[name] = TargetLayer(module.in_features, module.out_features, is_output)
        elif isinstance(module, torch.nn.Embedding):
            layers[name] = TargetLayer(module.num_embeddings, module.embedding_dim, is_end=True)
    return layers
