"""How a guard engine comes by its backend. Imports no vLLM until a backend starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.recipe import Kind, Recipe
from serve.engine.adapter import ServableAdapter
from serve.engine.backend import Backend
from serve.engine.backends.arguments import encoder_args, engine_args

Adapters: TypeAlias = Sequence[ServableAdapter]
Overrides: TypeAlias = Mapping[str, Any]
# A function that starts a backend which is ready to load the adapters, and has loaded none. The
# overrides win over the recipe's `engine` section; the builder makes what it will be asked. Raises
# GuardError if the backend does not start.
StartBackend = Callable[[Recipe, Adapters, Overrides, PromptBuilder], Backend]


def _start_decoder(
    recipe: Recipe, adapters: Adapters, overrides: Overrides, prompts: PromptBuilder
) -> Backend:
    args = engine_args(recipe, adapters, overrides)
    from serve.engine.backends.decoder import DecoderBackend  # imports vLLM

    return DecoderBackend(args, prompts.yes_id, prompts.no_id)


def _start_encoder(
    recipe: Recipe, adapters: Adapters, overrides: Overrides, prompts: PromptBuilder
) -> Backend:
    args = encoder_args(recipe, overrides)
    from serve.engine.backends.encoder import EncoderBackend  # imports vLLM

    assert isinstance(prompts, EncoderPromptBuilder)
    return EncoderBackend(args, prompts, recipe.context_tokens)


STARTS: dict[Kind, StartBackend] = {"decoder": _start_decoder, "encoder": _start_encoder}
