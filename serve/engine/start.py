"""How a guard engine comes by its backend. Imports no vLLM until a backend starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from guard.recipe import Recipe
from serve.engine.adapter import ServableAdapter
from serve.engine.arguments import engine_args
from serve.engine.backend import Backend


class StartBackend(Protocol):
    """A function that starts a backend."""

    def __call__(
        self,
        recipe: Recipe,
        adapters: Sequence[ServableAdapter],
        overrides: Mapping[str, Any],
        yes_id: int,
        no_id: int,
    ) -> Backend:
        """A backend that is ready to load `adapters`, and none of them loaded yet.

        `overrides` win over the recipe's `engine` section. A logit is that of the token `yes_id`
        against that of `no_id`. Raises GuardError if the backend does not start.
        """


def start_decoder(
    recipe: Recipe,
    adapters: Sequence[ServableAdapter],
    overrides: Mapping[str, Any],
    yes_id: int,
    no_id: int,
    *,
    needs_seams: bool = True,
) -> Backend:
    """vLLM in this process, with a causal language model (`decoder.py`).

    Raises GuardError if it does not start, or if vLLM is not patched everywhere, unless
    `needs_seams` is off: to measure what a seam brings.
    """
    args = engine_args(recipe, adapters, overrides)
    from serve.engine.decoder import DecoderBackend  # imports vLLM

    return DecoderBackend(args, yes_id, no_id, needs_seams=needs_seams)
