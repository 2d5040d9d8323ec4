"""Which builder makes the prompts of a kind of base: an entry of BUILDERS."""

from __future__ import annotations

from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.recipe import Kind, Recipe

BUILDERS: dict[Kind, type[PromptBuilder]] = {
    "decoder": PromptBuilder,
    "encoder": EncoderPromptBuilder,
}


def prompt_builder(recipe: Recipe) -> PromptBuilder:
    return BUILDERS[recipe.kind].of(recipe)
