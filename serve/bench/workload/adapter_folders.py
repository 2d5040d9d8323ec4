"""Which adapters a benchmark measures with: the trained ones, or random ones, as often as it needs.

Knows nothing of engines or of what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import Recipe
from serve.bench.workload.random_adapter import random_adapters
from serve.engine.adapter import Requirements, trained

MARGIN_TOKENS = 200  # of a rule's suffix, and by which a repeat's conversation may be longer

Folders = Mapping[str, Sequence[Path]]  # adapter folders by method


@contextlib.contextmanager
def adapter_folders(
    recipe: Recipe, runs: Runs, *, is_random: bool, rule: str | None = None
) -> Iterator[dict[str, list[Path]]]:
    """The adapter folders to measure with, by method.

    The trained ones of `rule` (None: of all), or random ones.

    Raises GuardError if there is none to serve.
    """
    methods = recipe.adapter_methods
    if is_random:
        with random_adapters(recipe, methods, 1) as made:
            yield {method: list(of_method.values()) for method, of_method in made.items()}
        return
    try:
        folders = {}
        for method in methods:
            folders[method] = _servable(trained(runs, recipe.name, method, rule), recipe)
    except GuardError as error:
        remedy = f"{error.remedy}; or time adapters with random weights: option --random"
        raise GuardError(error.problem, where=error.where, got=error.got, remedy=remedy) from error
    yield folders


def _servable(adapters: Mapping[str, Path], recipe: Recipe) -> list[Path]:
    """The folders that this base can serve; of the others it prints why not.

    Raises GuardError if there is none.
    """
    requirements = Requirements.of(recipe)
    servable: list[Path] = []
    refused: list[GuardError] = []
    for name, folder in adapters.items():
        try:
            servable.append(requirements.admit(name, folder).folder)
        except GuardError as error:
            refused.append(error)
    if not servable:
        raise refused[0]
    for refusal in refused:
        print(f"left out: {refusal}", flush=True)
    return servable


def copies(folders: Folders, count: int) -> tuple[dict[str, list[str]], dict[str, Path]]:
    """`count` names for each method, and the folder of each name.

    The same adapters again and again.
    """
    names: dict[str, list[str]] = {}
    adapters: dict[str, Path] = {}
    for method, of_method in folders.items():
        names[method] = [f"{method}-{number}" for number in range(count)]
        for number, name in enumerate(names[method]):
            adapters[name] = of_method[number % len(of_method)]
    return names, adapters
