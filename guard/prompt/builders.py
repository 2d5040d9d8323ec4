"""Which builder makes the prompts of a kind of base: an entry of BUILDERS."""

from __future__ import annotations

from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import Kind, Recipe

BUILDERS: dict[Kind, type[PromptBuilder]] = {
    "decoder": PromptBuilder,
    "encoder": EncoderPromptBuilder,
    "gliner2": Gliner2PromptBuilder,
}


def prompt_builder(recipe: Recipe) -> PromptBuilder:
    """The builder of the recipe's kind. Raises GuardError where its base has no fit tokenizer."""
    return BUILDERS[recipe.kind].of(recipe)
