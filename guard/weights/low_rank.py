"""PEFT adapters as one: its update of each layer is the sum of theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from guard.errors import GuardError
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS

# Of a configuration: with any of them an update is not alpha / r of A and B in every layer.
NOT_SUMMED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias")


def peft_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / PEFT_CONFIG).read_bytes())
    return config


def write_sum(adapters: Mapping[Path, float], folder: Path) -> None:
    """Write the sum of adapters, each times a factor: A of each, scaled, on top of one another, B
    side by side, in float32. Raises GuardError for an update of another kind.
    """
    configs = {adapter: peft_config(adapter) for adapter in adapters}
    for adapter, config in configs.items():
        for key in NOT_SUMMED:
            if config.get(key) not in (None, False, {}, "none"):
                problem, remedy = f"an adapter with {key} is in no sum", f"Train it without {key}"
                raise GuardError(problem, where=adapter, got=config[key], remedy=remedy)
    factors = {adapter: load_file(adapter / PEFT_WEIGHTS) for adapter in adapters}
    summed: dict[str, np.ndarray] = {}
    for name in sorted(set[str]().union(*factors.values())):
        is_a = ".lora_A." in name
        like = next(of_one[name] for of_one in factors.values() if name in of_one)
        parts: list[np.ndarray] = []
        for adapter, config in configs.items():
            rank, scale = config["r"], 1.0
            shape = (rank, like.shape[1]) if is_a else (like.shape[0], rank)
            if is_a:
                scale = adapters[adapter] * config["lora_alpha"] / rank
            factor = factors[adapter].get(name, np.zeros(shape))  # not every one has every layer
            parts.append(factor.astype(np.float32) * np.float32(scale))
        summed[name] = np.concatenate(parts, axis=0 if is_a else 1)
    rank = sum(config["r"] for config in configs.values())
    layers = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in summed}
    as_one = {"r": rank, "lora_alpha": rank, "target_modules": sorted(layers)}
    as_one |= dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(summed, folder / PEFT_WEIGHTS)
    (folder / PEFT_CONFIG).write_text(json.dumps(next(iter(configs.values())) | as_one, indent=2))
