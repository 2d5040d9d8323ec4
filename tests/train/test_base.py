"""The base that weights are served on: in the recipe's dtype, and nothing of it is trained. What a
library refuses of a recipe says where it stands.
"""

from __future__ import annotations

import pytest
import torch

from guard.errors import GuardError
from guard.recipe import load_recipe
from train.base import load_served_base, pinned, refusals

TINY = load_recipe("tiny")


def test_the_served_base_is_frozen_in_the_recipe_s_dtype_and_attends_without_cudnn() -> None:
    """cuDNN's backward pass gives NaN on a Hopper GPU."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    base = load_served_base(TINY, torch.device("cpu"))
    assert not base.training
    assert not any(weight.requires_grad for weight in base.parameters())
    assert base.dtype == getattr(torch, TINY.dtype)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_base_of_the_checkout_needs_no_network() -> None:
    assert pinned(TINY) == {"revision": None, "local_files_only": True}


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError, ImportError])
def test_what_a_library_refuses_names_the_library_and_the_section(error: type[Exception]) -> None:
    told = "recipe x: trainer: PEFT rejected these values: no such rank"
    with pytest.raises(GuardError, match=told), refusals("PEFT", "recipe x: trainer"):
        raise error("no such rank")
    with pytest.raises(KeyError), refusals("PEFT", "recipe x: trainer"):
        raise KeyError("ours")
