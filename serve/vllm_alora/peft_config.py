"""What PEFT does with an `adapter_config.json`, as far as it is served. Imports no vLLM.

PEFT acts on every field of its LoraConfig. An engine that ignored one would serve another function
than was trained, so a field with no place here is refused by its name, unless it is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Served as PEFT does: rank and scaling (vLLM's PEFTHelper), layers (`is_adapted`), and invocation.
HONOURED = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "alora_invocation_tokens"),
)
# Of these nothing depends once an adapter is trained.
WITHOUT_EFFECT = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "lora_dropout"),
    "fan_in_fan_out",  # how PEFT merges into GPT-2's layers
    *("megatron_core", "qalora_group_size"),  # read only beside fields that are refused
)
# The other ways to initialise an adapter change the base's weights.
ONLY_WITH: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
ALL_LINEAR = "all-linear"
LAYER = r".*?\.[^.]*\.(?P<number>\d+)\."  # of a layer's name, without a `layers_pattern`


def unserved(config: Mapping[str, Any]) -> str | None:
    """The first field that PEFT would act on and the engine would not; None if there is none."""
    for name, value in config.items():
        if name in HONOURED or name in WITHOUT_EFFECT:
            continue
        is_served = value in ONLY_WITH[name] if name in ONLY_WITH else not value
        if not is_served:
            return name
    return None


def is_adapted(config: Mapping[str, Any], layer: str) -> bool:
    """PEFT's `check_target_module_exists`. Raises re.error for a pattern that is none."""
    if _is_named(config.get("exclude_modules"), layer):
        return False
    targets = config["target_modules"]
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or _is_named(targets, layer)
    return layer in targets or (_is_named(targets, layer) and _is_transformed(config, layer))


def _is_named(names: str | Sequence[str] | None, layer: str) -> bool:
    """Whether a pattern is the layer's whole name, or one of several names is its end."""
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None if names else False
    return any(layer == name or layer.endswith(f".{name}") for name in names or ())


def _is_transformed(config: Mapping[str, Any], layer: str) -> bool:
    """Whether the layer's number is among `layers_to_transform`, where there are any."""
    numbers = config.get("layers_to_transform")
    if numbers is None or numbers == []:
        return True
    names = config.get("layers_pattern") or ()
    patterns = [rf"(?:^|.*?\.){name}\.(?P<number>\d+)\." for name in _listed(names)]
    for pattern in patterns or [LAYER]:
        match = re.match(pattern, layer)
        if match is not None:
            return int(match["number"]) in _listed(numbers)
    return False


def _listed(value: Any) -> Sequence[Any]:
    """A list of the value, if it is none."""
    return value if isinstance(value, list | tuple) else [value]
