"""How a rule's examples become weights, by name. Stages have tables of what they do for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from guard.errors import GuardError, choose_from

ActsFrom = Literal["prompt", "suffix", "output"]


@dataclass(frozen=True)
class Method:
    """One way to answer a rule on a frozen base.

    `acts_from` is the first token whose computation the weights change. "prompt": all of them, so
    nothing of a conversation is shared between rules. "suffix": those behind the conversation.
    "output": none; the weights read the base's states and the words.
    """

    name: str  # the key in a recipe, and the name of the folder of its weights
    label: str  # in tables and plots
    acts_from: ActsFrom
    weights: str  # the file's name in the folder
    # Whether the seed changes the weights; otherwise only seed 0 is trained.
    is_seeded: bool = True

    @property
    def shares_conversation(self) -> bool:
        """Whether a conversation is prefilled once for all rules of this method."""
        return self.acts_from != "prompt"

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are a PEFT adapter, which changes what the base computes."""
        return self.acts_from != "output"

    @property
    def files(self) -> tuple[str, ...]:
        """All files beside a card that decide what the weights answer."""
        if not self.is_adapter:
            return (self.weights,)
        return (self.weights, PEFT_CONFIG, *OPTIONAL_FILES)


PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
HEAD = "head.safetensors"  # a head, and the one on an aLoRA's states
WORDS = "words.safetensors"  # the rule's word weights beside those of an encoder's adapter
OPTIONAL_FILES = (WORDS, HEAD)  # beside an adapter; a head's own file is not

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("lora", "LoRA", "prompt", PEFT_WEIGHTS),
        Method("alora", "aLoRA", "suffix", PEFT_WEIGHTS),
        Method("head", "head", "output", HEAD, is_seeded=False),
    )
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise GuardError("no such method", got=name, remedy=choose_from(name, METHODS))
    return METHODS[name]
