"""Bases, frozen: whole, in 4 bits (QLoRA, Dettmers et al., 2023, arXiv 2305.14314), and as they are
served. Their linear layers by oneDNN where PyTorch's own products are slow, and refusals of a
recipe by a library. Knows nothing of adapters or training loops.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from guard.errors import GuardError
from guard.machine.device import is_slow_in_mkl
from guard.recipe import Recipe
from train.rounded import TYPES, round_as_served

ALLOCATED_AT = 64  # PyTorch's own memory is at multiples of so many bytes, a mapped file's not


def load_served_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that weights are served on: their verdicts are calibrated and tested on it."""
    return load_base_in(recipe.serving_quantization, recipe, device)


def load_base_in(quantization: str | None, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base in a quantization and the dtype of training, frozen on `device`."""
    dtype, options = getattr(torch, recipe.dtype), pinned(recipe)
    if quantization == "nf4":
        check_4_bits(recipe, device)
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(recipe.base_path, dtype=dtype, **options)
    for module in model.modules():
        # Else bitsandbytes packs weights for inference on a CPU in eval mode, and a product with
        # packed ones has no gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    if quantization != "nf4":
        cast(nn.Module, model).to(device)
    if quantization in TYPES:
        round_as_served(model, TYPES[quantization])
    return frozen(model)


def check_4_bits(recipe: Recipe, device: torch.device) -> None:
    """Raise GuardError where bitsandbytes is not there, or cannot quantise on this device."""
    try:
        import bitsandbytes

        weights = torch.ones(64, 64, device=device)
        bitsandbytes.functional.quantize_4bit(weights, quant_type="nf4")
    except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
        problem = f"this machine cannot train in 4 bits: {error}"
        where = f"recipe {recipe.name}: quantization"
        remedy = "Remove the key, or install a build of bitsandbytes for this machine"
        raise GuardError(problem, where=where, got="nf4", remedy=remedy) from error


def pinned(recipe: Recipe) -> dict[str, Any]:
    """The arguments of `from_pretrained` that fix the base's commit; a folder needs no network."""
    return {"revision": recipe.commit, "local_files_only": Path(recipe.base_path).is_dir()}


def frozen(model: nn.Module) -> PreTrainedModel:
    """The model in evaluation, none of its weights trainable, those that are a file's mapped pages
    copied: passes take 1.5 to 1.9 times as long on such pages. From then on this process attends
    without cuDNN. On a Hopper GPU its backward pass can give NaN under a mask whose width is 64
    beyond a multiple of 128 (pytorch/pytorch#196678): a LoRA on `tiny` was lost at its 98th step.
    """
    for weight in model.parameters():
        if weight.data_ptr() % ALLOCATED_AT:
            weight.data = weight.data.clone()
    torch.backends.cuda.enable_cudnn_sdp(False)
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


@contextmanager
def refusals(library: str, where: str) -> Iterator[None]:
    """Raise a library's error about values that it cannot use as a GuardError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        problem = f"{library} rejected these values: {error}"
        raise GuardError(problem, where=where, remedy="Correct them in the recipe") from error


@contextmanager
def by_onednn(model: nn.Module) -> Iterator[None]:
    """Let oneDNN compute the float32 linear layers of `model`, without gradients and for the
    duration, where MKL is slow on this CPU. What is on a GPU, of another type or quantised stays.
    """
    layers: list[nn.Module] = []
    if is_slow_in_mkl() and torch.backends.mkldnn.is_available():
        layers = [module for module in model.modules() if _is_plain_float32(module)]
    for layer in layers:
        layer.forward = functools.partial(_product, cast(nn.Linear, layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's is found again


def _is_plain_float32(module: nn.Module) -> bool:
    """Whether it is a linear layer in float32 on the CPU, whose computation nothing has changed."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's product, `[..., in]` -> `[..., out]`, as torch.compile has it computed."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, layer.weight, layer.bias, "none", [], ""
    )
    return product
