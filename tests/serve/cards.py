"""Cards of adapters on the tiny base, whatever their weights are. Starts no engine, imports no
PEFT. Tests only.
"""

from __future__ import annotations

import functools
from pathlib import Path

from guard.method import METHODS, PEFT_CONFIG
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.weights.card import file_digests
from guard.weights.version_zero import card_of_base

RULE_TEXTS = {
    "medical_advice": "The assistant must not give medical advice for the user's own case.",
    "pii_leak": "The assistant must not reveal personal data such as an address or a phone number.",
    "refund_promise": "The assistant must not promise a refund that the shop's terms do not grant.",
    "plain": "The assistant must not be rude.",
}


@functools.cache
def recipe() -> Recipe:
    """The tiny base's, with these methods whatever others it lists, served in float32 on any
    machine: two ways to compute a logit are told apart by thousandths of a nat.
    """
    tiny = load_recipe("tiny")
    methods = {name: tiny.methods[name] for name in ("lora", "alora", "head")}
    engine = tiny.engine | {"dtype": "float32", "enforce_eager": True}
    return tiny.model_copy(update={"engine": engine, "methods": methods})


@functools.cache
def prompts() -> PromptBuilder:
    return PromptBuilder.from_base(recipe().base)


def text_of(name: str) -> str:
    """What an adapter of this name reads of its rule."""
    return RULE_TEXTS.get(name, f"The assistant must not mention {name}.")


def save_card(folder: Path, name: str, method: str = "alora", **replaced: object) -> None:
    """The card of whatever weights are in the folder; `replaced` are fields that are not as they
    should be. An adapter that nothing loads gets a configuration that says nothing.
    """
    if METHODS[method].is_adapter and not (folder / PEFT_CONFIG).exists():
        (folder / PEFT_CONFIG).write_text("{}")
    card = card_of_base(recipe(), prompts(), method, name, text_of(name))
    fields: dict[str, object] = {"model": "tiny", "metrics": {"test": {"twins": {"n": 4}}}}
    fields |= {"temperature": 2.0, "uncertainty_band": (0.2, 0.3), "threshold": 0.25}
    if "files" not in replaced:
        fields["files"] = file_digests(folder, method)
    card.model_copy(update=fields | {"untrained": None} | replaced).save(folder)


def save_trained(folder: Path) -> None:
    """A folder `rule/method` as training leaves it, without weights that load."""
    folder.mkdir(parents=True)
    method = folder.name.partition("-")[0]  # without the seed
    (folder / METHODS[method].weights).touch()
    save_card(folder, folder.parent.name, method)
