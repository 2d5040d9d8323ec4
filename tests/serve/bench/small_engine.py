"""A recipe for engines that start in a second or two. Tests only.

The benchmarks' tests look at counts, not at times, so nothing has to be compiled.
"""

from __future__ import annotations

from typing import Any

from guard.recipe import Recipe
from tests.serve.cards import recipe

ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}


def small_recipe(**engine: Any) -> Recipe:
    """The tiny base's, with these engine arguments over those of small engines."""
    return recipe().model_copy(update={"engine": recipe().engine | ENGINE | engine})
