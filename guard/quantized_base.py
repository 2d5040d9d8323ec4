"""A base whose linear layers are in 8 bits, each output channel with a scale of its own, made once
from another in the format of compressed-tensors. The rest stays as it is; the embedding is rounded
where it is loaded (`serve/vllm_alora/embedding.py`). Knows no kernels.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from guard.base_weights import Tensor
from guard.errors import GuardError
from guard.made_base import Content, remade

SCALE = "_scale"  # behind the name of a weight
FLOATS = {"F32": np.float32, "F16": np.float16}  # those that numpy has


class EightBits(NamedTuple):
    """A type's names in safetensors and in compressed-tensors, and its largest value."""

    dtype: str
    kind: str
    largest: int


TYPES = {"int8": EightBits("I8", "int", 127), "fp8": EightBits("F8_E4M3", "float", 448)}


def quantized_base(base: Path, digest: str, name: str, where: str) -> Path:
    """The folder of the base in the type of this name. `digest` tells the base from every other
    one. Raises GuardError for a base without linear layers that are known as such.
    """

    def change(config: dict[str, Any], whole: list[Tensor]) -> Content:
        tensors: list[Tensor] = []
        for tensor in whole:
            tensors += _quantized(tensor, TYPES[name])
        if len(tensors) == len(whole):
            problem = "the base has no linear layers called model.layers.N"
            raise GuardError(problem, where=f"{where}: serving_quantization", remedy="Leave it out")
        return config | {"quantization_config": _config(TYPES[name])}, tensors

    return remade(base, f"{base.name}-{name}", f"{digest} {name}", change)


def _quantized(tensor: Tensor, bits: EightBits) -> list[Tensor]:
    """A linear layer's weight in 8 bits and its scales; any other tensor as it is."""
    if tensor.layer is None or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        return [tensor]
    name, shape, channels = tensor.name, tensor.shape, tensor.shape[0]

    def read(part: int) -> bytes:
        return _levels_and_scales(_float32(tensor), bits)[part].tobytes()

    levels = Tensor(name, bits.dtype, shape, math.prod(shape), partial(read, 0))
    return [levels, Tensor(name + SCALE, "F32", (channels, 1), 4 * channels, partial(read, 1))]


def _levels_and_scales(weights: np.ndarray, bits: EightBits) -> tuple[np.ndarray, np.ndarray]:
    """The weights [out, in] as values of the type, and what one is worth in each row."""
    scales = np.abs(weights).max(axis=1, keepdims=True) / np.float32(bits.largest)
    scales = np.where(scales > 0, scales, np.float32(1))
    scaled = weights * (1 / scales)
    if bits.kind == "int":
        return np.rint(scaled).astype(np.int8), scales
    return _float8(scaled), scales


def _float8(scaled: np.ndarray) -> np.ndarray:
    """Codes of E4M3: a sign, four bits of exponent, three of mantissa; the last is no number."""
    exponents, mantissas = np.divmod(np.arange(127), 8)
    values = np.ldexp(np.minimum(exponents, 1) + mantissas / 8, np.maximum(exponents, 1) - 7)
    halfway = (values[1:] + values[:-1]) / 2
    below, above = (np.searchsorted(halfway, np.abs(scaled), side) for side in ("left", "right"))
    codes = np.where(below % 2 == 0, below, above)  # of two as near the even one
    signed: np.ndarray = codes + 128 * (scaled < 0)
    return signed.astype(np.uint8)


def _float32(tensor: Tensor) -> np.ndarray:
    content = tensor.read()
    if tensor.dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(content, FLOATS[tensor.dtype]).astype(np.float32)
    return values.reshape(tensor.shape)


def _config(bits: EightBits) -> dict[str, Any]:
    """What compressed-tensors has in `config.json`."""
    eight_bits = {"num_bits": 8, "type": bits.kind, "symmetric": True}
    weights = eight_bits | {"strategy": "channel", "dynamic": False}
    activations = eight_bits | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    names = {"quant_method": "compressed-tensors", "format": f"{bits.kind}-quantized"}
    whole = {"ignore": ["lm_head"], "embedding": "int8"}  # vLLM rounds it when it is loaded
    return {**names, "config_groups": {"group_0": group}, **whole}
