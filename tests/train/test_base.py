"""The base that weights are served on: in the recipe's dtype, and nothing of it is trained. What a
library refuses of a recipe says where it stands.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from guard.errors import GuardError
from guard.recipe import load_recipe
from train import base as frozen_base
from train.base import by_onednn, load_served_base, pinned, refusals

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


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8, bias=False))


def computed(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The output, and how many products oneDNN was asked for."""
    with torch.no_grad(), Products() as products, by_onednn(model):
        return model(x), products.count


@pytest.fixture
def slow_mkl(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "is_slow_in_mkl", lambda: True)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (3, 7, 24), (2, 3, 4, 24), None])
def test_the_output_is_the_plain_one(slow_mkl: None, shape: tuple[int, ...] | None) -> None:
    model = layers()
    x = torch.randn(24, 6, 5).transpose(0, 2)[:, ::2]  # states that do not lie in a row
    if shape is not None:
        x = torch.randn(shape)
    with torch.no_grad():
        plain = model(x)
    output, products = computed(model, x)
    assert products == 2
    torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("is_slow", "layer"),
    [
        (False, nn.Linear(24, 8)),
        (True, nn.Linear(24, 8, dtype=torch.bfloat16)),
        (True, Doubled(24, 8)),
    ],
)
def test_others_stay_as_they_are(monkeypatch: MonkeyPatch, is_slow: bool, layer: nn.Linear) -> None:
    monkeypatch.setattr(frozen_base, "is_slow_in_mkl", lambda: is_slow)
    x = torch.randn(5, 24, dtype=layer.weight.dtype)
    with torch.no_grad():
        plain = layer(x)
    output, products = computed(layer, x)
    assert products == 0
    assert torch.equal(output, plain)


def test_what_has_been_put_in_a_layers_place_stays_there(slow_mkl: None) -> None:
    layer = nn.Linear(24, 8)
    layer.forward = torch.zeros_like  # type: ignore[method-assign]
    output, products = computed(layer, torch.randn(5, 24))
    assert products == 0 and not output.any()
    assert vars(layer)["forward"] is torch.zeros_like


def test_the_model_is_as_it_was_afterwards_even_after_an_error(slow_mkl: None) -> None:
    model, x = layers(), torch.randn(5, 24)
    before = [sorted(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError, match="stop"), by_onednn(model):
        assert "forward" in vars(model[0])
        raise RuntimeError("stop")
    assert [sorted(vars(module)) for module in model.modules()] == before
    with Products() as products:
        model(x).sum().backward()  # with a gradient, which oneDNN's product has not
    assert products.count == 0 and model[0].weight.grad is not None
