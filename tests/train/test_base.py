"""The base that weights are served on: in the recipe's dtype, and nothing of it is trained. What a
library refuses of a recipe says where it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from guard.errors import GuardError
from guard.recipe import load_recipe
from train import base as frozen_base
from train.base import ALLOCATED_AT, by_onednn, load_served_base, pinned, refusals

TINY = load_recipe("tiny")


def test_the_served_base_is_frozen_in_the_recipe_s_dtype_and_attends_without_cudnn() -> None:
    """cuDNN's backward pass gives NaN on a Hopper GPU. A base of the checkout needs no network."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    base = load_served_base(TINY, torch.device("cpu"))
    assert not base.training
    assert not any(weight.requires_grad for weight in base.parameters())
    assert base.dtype == getattr(torch, TINY.dtype)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert pinned(TINY) == {"revision": None, "local_files_only": True}


def test_no_weight_of_a_frozen_model_lies_on_a_file_s_pages(tmp_path: Path) -> None:
    layer, weight = nn.Linear(8, 8, bias=False), torch.randn(8, 8)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    layer.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert layer.weight.data_ptr() % ALLOCATED_AT
    frozen_base.frozen(layer)
    assert layer.weight.data_ptr() % ALLOCATED_AT == 0
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError, ImportError])
def test_what_a_library_refuses_names_the_library_and_the_section(error: type[Exception]) -> None:
    told = "recipe x: trainer: PEFT rejected these values: no such rank"
    with pytest.raises(GuardError, match=told), refusals("PEFT", "recipe x: trainer"):
        raise error("no such rank")
    with pytest.raises(KeyError), refusals("PEFT", "recipe x: trainer"):
        raise KeyError("ours")


class Products(TorchDispatchMode):
    """Counts the products that oneDNN is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mkldnn::_linear_pointwise" in str(func.name())
        return func(*args, **(kwargs or {}))


class Doubled(nn.Linear):
    """A layer of another type."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replaced() -> nn.Linear:
    """A layer in whose place something else has been put."""
    layer = nn.Linear(24, 8)
    layer.forward = torch.zeros_like  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("is_slow", "layer", "products"),
    [
        (True, nn.Linear(24, 8), 1),
        (True, nn.Linear(24, 8, bias=False), 1),
        (False, nn.Linear(24, 8), 0),
        (True, nn.Linear(24, 8, dtype=torch.bfloat16), 0),
        (True, Doubled(24, 8), 0),
        (True, replaced(), 0),
    ],
)
def test_plain_layers_alone_are_computed_by_onednn_where_mkl_is_slow(
    monkeypatch: MonkeyPatch, is_slow: bool, layer: nn.Linear, products: int
) -> None:
    """States may have any shape, and need not lie in a row. Afterwards the layer is as it was, even
    after an error.
    """
    monkeypatch.setattr(frozen_base, "is_slow_in_mkl", lambda: is_slow)
    before = dict(vars(layer))
    strided = torch.randn(24, 6, 5).transpose(0, 2)[:, ::2]
    for x in (torch.randn(24), torch.randn(5, 24), torch.randn(2, 3, 4, 24), strided):
        states = x.to(layer.weight.dtype)
        with torch.no_grad():
            plain = layer(states)
        stopped = pytest.raises(RuntimeError, match="stop")
        with stopped, torch.no_grad(), Products() as asked, by_onednn(layer):
            torch.testing.assert_close(layer(states), plain, rtol=1e-5, atol=1e-6)
            raise RuntimeError("stop")
        assert asked.count == products
        assert vars(layer) == before
