"""A base whose linear layers are in 8 bits, made once from another and kept, in the format of
compressed-tensors. Each output channel of a weight has a scale of its own. Embedding, output layer
and norms stay as they are; who computes rounds each token's activations. Knows no kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guard.base_weights import Tensor, tensors_of
from guard.errors import GuardError
from guard.made_base import config_of, copy_other_files, made, write_base

SCALE = "_scale"  # behind the name of a weight
FLOATS = {"F32": np.float32, "F16": np.float16}  # those that numpy has


@dataclass(frozen=True)
class EightBits:
    """A type of 8 bits: its names in safetensors and in compressed-tensors, its largest value, and
    what gives the nearest values of it.
    """

    dtype: str
    kind: str
    largest: float
    nearest: Callable[[np.ndarray], np.ndarray]


def _nearest_int8(scaled: np.ndarray) -> np.ndarray:
    return np.rint(scaled).astype(np.int8)


def _nearest_float8(scaled: np.ndarray) -> np.ndarray:
    """Codes of E4M3: a sign, four bits of exponent, three of mantissa; the last is no number."""
    exponents, mantissas = np.divmod(np.arange(127), 8)
    has_leading_one = np.minimum(exponents, 1)
    values = np.ldexp(has_leading_one + mantissas / 8, np.maximum(exponents, 1) - 7)
    halfway = (values[1:] + values[:-1]) / 2
    codes = np.searchsorted(halfway, np.abs(scaled)) + 128 * (scaled < 0)
    return codes.astype(np.uint8)


TYPES = {
    "int8": EightBits("I8", "int", 127, _nearest_int8),
    "fp8": EightBits("F8_E4M3", "float", 448, _nearest_float8),
}


def quantized_base(base: Path, digest: str, name: str, where: str) -> Path:
    """The folder of the base in the type of this name. `digest` tells the base from every other
    one. Raises GuardError for a base without linear layers that are known as such.
    """
    bits = TYPES[name]

    def fill(folder: Path) -> None:
        copy_other_files(base, folder)
        tensors: list[Tensor] = []
        for tensor in tensors_of(base):
            tensors += _quantized(tensor, bits)
        if not any(tensor.dtype == bits.dtype for tensor in tensors):
            problem, remedy = "no linear layers are called model.layers.N", "Leave it out"
            key = f"{where}: serving_quantization"
            raise GuardError(problem, where=key, got=base, remedy=remedy)
        write_base(folder, config_of(base) | {"quantization_config": _config(bits)}, tensors)

    return made(f"{base.name}-{name}", f"{digest} {name}", None, fill)


def _quantized(tensor: Tensor, bits: EightBits) -> list[Tensor]:
    """A linear layer's weight in 8 bits, and its scales; any other tensor as it is. Either is
    computed when it is read, and not kept.
    """
    if tensor.layer is None or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        return [tensor]
    channels = tensor.shape[0]

    def levels() -> bytes:
        weights = _float32(tensor)
        return bits.nearest(weights / _scales(weights, bits)).tobytes()

    def scales() -> bytes:
        return _scales(_float32(tensor), bits).tobytes()

    return [
        Tensor(tensor.name, bits.dtype, tensor.shape, math.prod(tensor.shape), levels),
        Tensor(tensor.name + SCALE, "F32", (channels, 1), 4 * channels, scales),
    ]


def _scales(weights: np.ndarray, bits: EightBits) -> np.ndarray:
    """What a level of each output channel is worth, [out, 1]."""
    scales: np.ndarray = np.abs(weights).max(axis=1, keepdims=True) / np.float32(bits.largest)
    return np.where(scales > 0, scales, np.float32(1))


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
    return {**names, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
