"""Weights one at a time, against safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from guard.base_weights import tensors_of, write_tensors
from guard.errors import GuardError


def test_what_is_read_and_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    stored = {
        "model.layers.11.w": torch.randn(3, 5),
        "model.norm": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.0, dtype=torch.float16),
    }
    save_file(stored, tmp_path / "a.safetensors")
    tensors = list(tensors_of(tmp_path))
    assert {tensor.name: tensor.layer for tensor in tensors} == {
        "model.layers.11.w": 11,
        "model.norm": None,
        "scalar": None,
    }
    written: list[int] = []
    write_tensors(tmp_path / "b.safetensors", tensors, written.append)
    found = load_file(tmp_path / "b.safetensors")
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    assert sum(written) == 3 * 5 * 4 + 7 * 2 + 2


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.int8)}, tmp_path / "a.safetensors")
    with pytest.raises(GuardError, match=r"a.safetensors: w: weights of this type .*got I8"):
        list(tensors_of(tmp_path))
