"""A base in 8 bits: what is rounded, to what, and in how much memory; whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from guard.errors import GuardError
from guard.quantized_base import EightBits, _levels_and_scales, quantized_base

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
KEPT = {"embed_tokens", "lm_head", "norm", "input_layernorm", "q_norm"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A random decoder of four layers, with an output layer of its own; one channel is zero."""
    sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    torch.manual_seed(3)
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=False)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=request.param)
    model.model.layers[0].mlp.up_proj.weight.data[5] = 0
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def quantized(base: Path, name: str = "int8") -> Path:
    return quantized_base(base, "its digest", name, "recipe toy")


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_linear_layers_are_rounded_by_channel_and_the_rest_stays(base: Path, name: str) -> None:
    whole, made = (
        load_file(folder / "model.safetensors") for folder in (base, quantized(base, name))
    )
    assert whole.keys() == {key for key in made if not key.endswith("_scale")}
    for key, weight in whole.items():
        if f"{key}_scale" not in made:
            assert torch.equal(made[key], weight) and any(part in key for part in KEPT)
            continue
        levels, scales = made[key], made[f"{key}_scale"]
        assert levels.dtype in LARGEST and scales.shape == (len(weight), 1)
        largest = weight.float().abs().amax(1, keepdim=True)
        torch.testing.assert_close(largest, scales * levels.float().abs().amax(1, keepdim=True))
        scaled = weight.float() / scales
        nearest = scaled.round() if name == "int8" else scaled.to(levels.dtype).float()
        assert torch.equal(levels.float(), nearest)
    rounded = [key for key in made if key.endswith("_scale")]
    assert len(rounded) == 4 * 7


def test_what_is_halfway_goes_to_the_even_value_of_eight_bits() -> None:
    """Of every value of E4M3, of what is halfway to the next, and of both with a minus."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    row = torch.cat([values, (values[1:] + values[:-1]) / 2])
    rows = torch.stack([row, -row]).numpy()
    codes, scales = _levels_and_scales(rows, EightBits("F8_E4M3", "float", 448))
    assert np.array_equal(scales, [[1], [1]])
    found = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert torch.equal(found, torch.from_numpy(rows).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_configuration_is_one_of_compressed_tensors(base: Path, name: str) -> None:
    config = json.loads((quantized(base, name) / "config.json").read_text())
    whole = json.loads((base / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert config == whole and stated["ignore"] == ["lm_head"]
    (group,) = QuantizationConfig.model_validate(stated).config_groups.values()
    assert group.targets == ["Linear"]
    assert group.weights.strategy == QuantizationStrategy.CHANNEL and not group.weights.dynamic
    activations = group.input_activations
    assert activations.strategy == QuantizationStrategy.TOKEN and activations.dynamic is True
    for stated in (group.weights, activations):
        assert stated.symmetric and stated.num_bits == 8
        assert stated.type == {"int8": "int", "fp8": "float"}[name]


def test_it_is_made_once_of_each_type_and_a_tensor_at_a_time(base: Path) -> None:
    weights = base / "model.safetensors"
    tracemalloc.start()
    made = quantized(base)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 256 * 128 * 6, "float32 copies of a tensor, not of the base"
    assert (made / "model.safetensors").stat().st_size < 0.8 * weights.stat().st_size
    time = (made / "model.safetensors").stat().st_mtime_ns
    assert quantized(base) == made and (made / "model.safetensors").stat().st_mtime_ns == time
    assert len({made, quantized(base, "fp8"), quantized_base(base, "new", "int8", "")}) == 3


def test_a_full_disk_leaves_nothing(
    base: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("guard.quantized_base._levels_and_scales", full)  # in the midst of the file
        with pytest.raises(GuardError, match=r"cannot be made: No space left.*XDG_CACHE_HOME"):
            quantized(base)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    assert quantized(base).is_dir()


def test_a_base_whose_linear_layers_are_not_known_is_refused(base: Path, cache: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    named = {key.replace("model.layers", "gpt_neox.layers"): it for key, it in tensors.items()}
    save_file(named, base / "model.safetensors")
    with pytest.raises(GuardError, match=r"toy: serving_quantization: .*no linear layers called"):
        quantized(base)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
