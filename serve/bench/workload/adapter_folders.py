"""The adapters that a benchmark measures with: trained or random ones, as many as it needs.

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

MARGIN_TOKENS = 200  # for a rule's suffix, and because a repeat's conversation may be longer

Folders = Mapping[str, Sequence[Path]]  # adapter folders by method


@contextlib.contextmanager
def adapter_folders(
    recipe: Recipe, runs: Runs, *, is_random: bool, rule: str | None = None
) -> Iterator[dict[str, list[Path]]]:
    """The adapter folders to measure with, by method: random ones, or the trained ones of `rule`
    (None: of all rules).

    Raises GuardError if none can be served.
    """
    methods = recipe.adapter_methods
    if is_random:
        with random_adapters(recipe, methods, 1) as made:
            yield {method: list(by_adapter.values()) for method, by_adapter in made.items()}
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
    """The folders that this base can serve. Prints why the others are left out.

    Raises GuardError if none can be served.
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
    """`count` names for each method, and the folder of each name. Adapters are reused as often as
    needed.
    """
    names: dict[str, list[str]] = {}
    adapters: dict[str, Path] = {}
    for method, method_folders in folders.items():
        names[method] = [f"{method}-{number}" for number in range(count)]
        for number, name in enumerate(names[method]):
            adapters[name] = method_folders[number % len(method_folders)]
    return names, adapters
