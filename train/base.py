"""The base that weights are served on, frozen, and refusals of a recipe by a library. Knows nothing
of adapters or training loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from guard.errors import GuardError
from guard.recipe import Recipe


def load_served_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that weights are served on, in the dtype of training, frozen on `device`."""
    model = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, dtype=getattr(torch, recipe.dtype), **pinned(recipe)
    )
    return frozen(cast(nn.Module, model).to(device))


def pinned(recipe: Recipe) -> dict[str, Any]:
    """The arguments of `from_pretrained` that fix the base's commit; a folder needs no network."""
    return {"revision": recipe.commit, "local_files_only": Path(recipe.base_path).is_dir()}


def frozen(model: nn.Module) -> PreTrainedModel:
    """The model in evaluation, none of its weights trainable. From then on this process attends
    without cuDNN. On a Hopper GPU its backward pass can give NaN under a mask whose width is 64
    beyond a multiple of 128 (pytorch/pytorch#196678): a LoRA on `tiny` was lost at its 98th step.
    """
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
