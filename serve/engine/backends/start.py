"""How a guard engine comes by its backend. Imports no vLLM until a backend starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import Kind, Recipe
from serve.engine.adapter import ServableAdapter
from serve.engine.backend import Backend
from serve.engine.backends.arguments import encoder_args, engine_args, gliner2_args


class StartBackend(Protocol):
    """A function that starts a backend."""

    def __call__(
        self,
        recipe: Recipe,
        adapters: Sequence[ServableAdapter],
        overrides: Mapping[str, Any],
        prompts: PromptBuilder,
    ) -> Backend:
        """A backend that is ready to load `adapters`, and none of them loaded yet.

        `overrides` win over the recipe's `engine` section; `prompts` builds what it will be asked.
        Raises GuardError if the backend does not start.
        """


def start_decoder(
    recipe: Recipe,
    adapters: Sequence[ServableAdapter],
    overrides: Mapping[str, Any],
    prompts: PromptBuilder,
    *,
    needs_seams: bool = True,
) -> Backend:
    """vLLM in this process, with a causal language model (`decoder.py`).

    Raises GuardError if it does not start, or if vLLM is not patched everywhere, unless
    `needs_seams` is off: to measure what a seam brings.
    """
    args = engine_args(recipe, adapters, overrides)
    from serve.engine.backends.decoder import DecoderBackend  # imports vLLM

    return DecoderBackend(args, prompts.yes_id, prompts.no_id, needs_seams=needs_seams)


def start_encoder(
    recipe: Recipe,
    adapters: Sequence[ServableAdapter],
    overrides: Mapping[str, Any],
    prompts: PromptBuilder,
) -> Backend:
    """vLLM in this process, with an encoder whose states heads read (`encoder.py`).

    Raises GuardError if it does not start, or if vLLM is not patched everywhere.
    """
    args = encoder_args(recipe, adapters, overrides)
    from serve.engine.backends.encoder import EncoderBackend  # imports vLLM

    assert isinstance(prompts, EncoderPromptBuilder)
    return EncoderBackend(args, prompts, recipe.context_tokens)


def start_gliner2(
    recipe: Recipe,
    adapters: Sequence[ServableAdapter],
    overrides: Mapping[str, Any],
    prompts: PromptBuilder,
) -> Backend:
    """vLLM in this process, with a GLiNER2 that answers rules as labels (`gliner2.py`).

    Raises GuardError if it does not start, or if vLLM is not patched everywhere.
    """
    args = gliner2_args(recipe, adapters, overrides)
    from serve.engine.backends.gliner2 import Gliner2Backend  # imports vLLM

    assert isinstance(prompts, Gliner2PromptBuilder)
    return Gliner2Backend(args, prompts, recipe.context_tokens)


STARTS: dict[Kind, StartBackend] = {
    "decoder": start_decoder,
    "encoder": start_encoder,
    "gliner2": start_gliner2,
}
