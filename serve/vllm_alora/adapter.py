"""An adapter folder as it lies on disk, read and checked before an engine sees it. Knows nothing of requests.

A bad adapter that reaches a worker stops the whole engine, and vLLM drops tensors whose names it does not expect. So
everything that can be known from the files and the model's architecture is checked here, once per content.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load
from vllm.exceptions import VLLMValidationError
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import (
    get_adapter_absolute_path,
    is_base_embedding_weights,
    parse_fine_tuned_lora_name,
)
from vllm.platforms import current_platform

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterError(VLLMValidationError, ValueError):
    """An adapter that cannot be served: what is wrong, where, what was found, what to do. One request's error (HTTP 400)."""

    def __init__(self, what: str, *, where: object, got: object = None, remedy: str) -> None:
        found = f" (got {got})" if got is not None else ""
        super().__init__(f"{where}: {what}{found}. {remedy}")


Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Adapter:
    """What the files say. `invocation` is empty for a plain LoRA; `content` is the SHA-256 of both files.

    `shapes` maps a module's name in the base model to the shapes of its A [rank, in] and B [out, rank].
    """

    path: str
    config: PEFTHelper
    invocation: tuple[int, ...]
    content: str
    shapes: Shapes


def read_adapter(path: str) -> Adapter:
    """The adapter in the folder (or hub id) `path`. Raises AdapterError.

    Cached for as long as neither file changes on disk, so that a request costs three `stat` calls. A hub id is looked up once.
    """
    folder = Path(path) if Path(path).is_dir() else _located(path)
    stamps = []
    for name in (CONFIG, WEIGHTS):
        try:
            stat = (folder / name).stat()
        except OSError as error:
            raise _missing(name, folder) from error
        stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return _read(str(folder), tuple(stamps))


@functools.lru_cache(maxsize=4096)
def _located(path: str) -> Path:
    """The folder of a hub id or of a path with "~": vLLM's answer, which for a hub id takes a request to the hub."""
    folder = Path(get_adapter_absolute_path(path))
    if not folder.is_dir():
        raise _missing(CONFIG, folder)  # and not kept: it may be there the next time
    return folder


def _missing(name: str, folder: Path) -> AdapterError:
    return AdapterError(
        f"the adapter has no {name}", where=folder, remedy="Train it, or correct the path"
    )


@functools.lru_cache(maxsize=4096)
def _read(path: str, stamps: tuple[tuple[int, int, int], ...]) -> Adapter:
    """Read and check the files; `stamps` only tells their versions apart."""
    try:
        config_bytes, weights_bytes = (Path(path, name).read_bytes() for name in (CONFIG, WEIGHTS))
    except OSError as error:
        raise AdapterError(
            f"cannot be read: {error}", where=path, remedy="Save it again, or correct the path"
        ) from error
    config = _config(path, config_bytes)
    return Adapter(
        path=path,
        config=config,
        invocation=tuple(config.alora_invocation_tokens or ()),
        content=hashlib.sha256(config_bytes + weights_bytes).hexdigest(),
        shapes=_shapes(path, config, weights_bytes),
    )


def _config(path: str, content: bytes) -> PEFTHelper:
    where = Path(path, CONFIG)
    try:
        fields = json.loads(content)
        config = PEFTHelper.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise AdapterError(
            f"not a LoRA configuration: {error}",
            where=where,
            remedy="Save it with PEFT's save_pretrained",
        ) from error
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            "not a LoRA adapter",
            where=where,
            got=fields.get("peft_type"),
            remedy="Only LoRA and aLoRA are served",
        )
    tokens = config.alora_invocation_tokens
    if tokens is not None and not (
        isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
    ):
        what = "alora_invocation_tokens must be a non-empty list of token ids"
        raise AdapterError(what, where=where, got=tokens, remedy="Train it again")
    return config


def _shapes(path: str, config: PEFTHelper, content: bytes) -> Shapes:
    where = Path(path, WEIGHTS)
    remedy = "Save the adapter with PEFT's save_pretrained"
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise AdapterError(
            f"not a safetensors file: {error}", where=where, remedy=remedy
        ) from error
    sides: dict[str, dict[bool, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and torch.isfinite(tensor).all()):
            raise AdapterError(
                "a tensor with NaN, infinite or integer values",
                where=where,
                got=name,
                remedy="Train it again",
            )
        if is_base_embedding_weights(name):
            continue  # PEFT saves them next to resized embeddings; vLLM leaves them out on purpose
        try:
            module, is_a = parse_fine_tuned_lora_name(name)
        except ValueError as error:
            raise AdapterError(
                "a tensor that is no LoRA weight", where=where, got=name, remedy=remedy
            ) from error
        if (
            module not in (config.modules_to_save or ()) and ".experts" not in module
        ):  # whole layers, fused experts: vLLM checks these
            sides.setdefault(module, {})[is_a] = tuple(tensor.shape)
    if not tensors:
        raise AdapterError("the adapter has no tensors", where=where, remedy=remedy)
    shapes = {}
    for module, side in sides.items():
        rank, _ = config.get_rank_and_scaling(module)
        a, b = side.get(True, ()), side.get(False, ())
        if not (len(a) == len(b) == 2 and a[0] == b[1] == rank):
            what = f"{module} needs A [{rank}, in] and B [out, {rank}]"
            raise AdapterError(what, where=where, got=f"A {list(a)}, B {list(b)}", remedy=remedy)
        shapes[module] = (a, b)
    return shapes


def check_adapter(adapter: Adapter, lora_config: Any, model_config: Any) -> None:
    """Raise AdapterError unless an engine with these settings and this model can serve `adapter`. Not cheap: once per content."""
    try:
        adapter.config.validate_legal(lora_config)
    except ValueError as error:
        raise AdapterError(
            str(error).rstrip("."),
            where=adapter.path,
            remedy="Change the adapter or the engine's settings",
        ) from error
    if current_platform.is_cpu():
        _check_cpu(adapter, lora_config, model_config)
    layers = _layers(model_config.hf_config)
    if layers is None:
        return
    for module, (a, b) in adapter.shapes.items():
        wanted, has = layers.get(module), (a[1], b[0])
        if wanted != has:
            found = (
                f"{has[0]} -> {has[1]}, where the model has {wanted[0]} -> {wanted[1]}"
                if wanted
                else "no such layer"
            )
            what = f"{module} does not fit the base model"
            raise AdapterError(
                what, where=adapter.path, got=found, remedy="Serve it on the base it was trained on"
            )


def _check_cpu(adapter: Adapter, lora_config: Any, model_config: Any) -> None:
    """Refuse what would go to vLLM's own CPU operator: it gives base tokens the adapter in the last slot."""
    if lora_config.lora_dtype != model_config.dtype:
        what = f"on a CPU adapters are served in the base's type, {model_config.dtype}"
        raise AdapterError(
            what, where=adapter.path, got=lora_config.lora_dtype, remedy="Leave lora_dtype at auto"
        )
    ends = [
        module
        for module in adapter.shapes
        if module.rpartition(".")[2] in ("embed_tokens", "lm_head")
    ]
    if ends:
        what = "on a CPU an adapter of the embedding or the output layer is not served"
        raise AdapterError(
            what, where=adapter.path, got=", ".join(ends), remedy="Train without them"
        )


Layers = Mapping[str, tuple[int, int]]

_layers_of: list[
    tuple[Any, Layers | None]
] = []  # a process has a configuration or two, which cannot be hashed


def _layers(hf_config: Any) -> Layers | None:
    """`_build_layers`, once per configuration."""
    for known, layers in _layers_of:
        if known is hf_config:
            return layers
    _layers_of.append((hf_config, _build_layers(hf_config)))
    return _layers_of[-1][1]


def _build_layers(hf_config: Any) -> Layers | None:
    """Name -> (in, out) of every layer an adapter may target, from an instance without memory of the class that PEFT adapted.

    None where that class does not settle the names: transformers does not have it, or the text model is part of a larger
    one, whose layers were renamed between versions. There the worker's own check (`placed`) has to do.
    """
    architecture = getattr(transformers, (hf_config.architectures or [""])[0], None)
    if architecture is None or hf_config.get_text_config() is not hf_config:
        return None
    with torch.device("meta"):
        model = architecture(hf_config)
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            layers[name] = (module.in_features, module.out_features)
        elif isinstance(module, torch.nn.Embedding):
            layers[name] = (module.num_embeddings, module.embedding_dim)
    return layers
