"""A base of one narrow layer: an engine on it spends its time in Python, hardly in the model.

Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guard.errors import GuardError
from guard.recipe import Recipe

NARROW: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "layer_types": ["full_attention"],
}


@contextlib.contextmanager
def narrow_base(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe on a narrow base with random weights and its own tokenizer, in a temporary folder.

    Raises GuardError if the recipe's base is not a folder of the checkout.
    """
    base = Path(recipe.base_path)
    if not base.is_dir():
        raise GuardError(
            "the narrow base is made from a base in the checkout",
            got=recipe.base,
            remedy="Use MODEL=tiny",
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in base.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        config = json.loads((base / "config.json").read_text(encoding="utf-8")) | NARROW
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _save_random_weights(folder)
        yield recipe.model_copy(update={"base": str(folder)})


def _save_random_weights(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
