"""Engines in benchmarks: their memory, and their scores or an error. Knows nothing of clocks."""

from __future__ import annotations

from collections.abc import Iterable

from guard.errors import GuardError
from guard.recipe import Recipe, ServingMemory
from serve.engine import Check, Refusal, Score
from serve.engine.backends.arguments import GIB, sizes_of


def with_room(recipe: Recipe, slots: int) -> Recipe:
    """The recipe with memory for so many slots beside what it states, and for all adapters."""
    stated = recipe.serving_memory.device_gib
    if stated is None:
        return recipe
    rank, targets = recipe.engine.get("max_lora_rank", 16), recipe.engine.get("lora_target_modules")
    slot = sizes_of(recipe, rank, targets).adapter
    memory = ServingMemory(device_gib=stated + slots * slot / GIB)
    return recipe.model_copy(update={"serving_memory": memory})


def scores_of(outcomes: Iterable[Score | Refusal], where: str) -> list[Score]:
    """The outcomes, if all are scores. Raises GuardError if one is a refusal."""
    scores = []
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            raise _refused(outcome, where)
        scores.append(outcome)
    return scores


def judged(check: Check, where: str) -> Check:
    """The check, in which every rule has a verdict. Raises GuardError if one was refused."""
    for refusal in check.refused.values():
        raise _refused(refusal, where)
    return check


def _refused(refusal: Refusal, where: str) -> GuardError:
    problem, remedy = "a benchmark request was refused", "Run `make doctor`"
    return GuardError(problem, where=where, got=refusal, remedy=remedy)
