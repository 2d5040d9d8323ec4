"""The parts of GLiNER2 that classify: encoder and classifier, no heads for spans and counts. Knows
nothing of rules or training. Named as in the package gliner2, so that an adapter of either loads in
the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils.hub import cached_file

from guard.base_files import ENCODER_CONFIG
from guard.errors import GuardError
from guard.recipe import Recipe
from train.base import frozen, pinned

PARTS = ("encoder.", "classifier.")


class Gliner2(nn.Module):
    """A classifier that gives a logit at each token; those at labels' markers are GLiNER2's."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.encoder = AutoModel.from_config(config)
        self.classifier = nn.Sequential(
            nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, 1)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and mask, int64 [windows, longest] -> [windows, longest, 1]."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits: Tensor = self.classifier(states)
        return logits


def gliner2_config(recipe: Recipe) -> Any:
    folder = str(Path(ENCODER_CONFIG).parent)
    return AutoConfig.from_pretrained(recipe.base_path, subfolder=folder, **pinned(recipe))


def load_gliner2(recipe: Recipe) -> Gliner2:
    """The base in the recipe's dtype, frozen. Raises GuardError where its weights are not those of
    a span extractor of gliner2.
    """
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    config = gliner2_config(recipe)
    config.dtype = dtype
    model = Gliner2(config).to(dtype)
    path = _weights_file(recipe)
    try:
        tensors = load_file(path)
        loaded = {name: tensor for name, tensor in tensors.items() if name.startswith(PARTS)}
        missing = model.load_state_dict(loaded, strict=False).missing_keys
    except (RuntimeError, OSError, SafetensorError) as error:
        raise _not_gliner2(recipe, " ".join(str(error).split())) from error
    if missing:
        raise _not_gliner2(recipe, f"no {', '.join(missing[:3])}")
    frozen(model)
    return model


def _weights_file(recipe: Recipe) -> Path:
    try:
        return Path(str(cached_file(recipe.base_path, "model.safetensors", **pinned(recipe))))
    except OSError as error:
        raise GuardError(
            f"the base's model.safetensors is not there: {' '.join(str(error).split())}",
            where=f"recipe {recipe.name}: base",
            got=recipe.base,
            remedy="Download it, or name a folder that has it",
        ) from error


def _not_gliner2(recipe: Recipe, why: str) -> GuardError:
    return GuardError(
        f"the weights are not those of a GLiNER2: {why}",
        where=f"recipe {recipe.name}: base",
        got=recipe.base,
        remedy="Name a checkpoint of gliner2's span architecture",
    )
