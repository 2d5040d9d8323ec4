"""What a library refuses of a recipe's settings, as our error. Knows nothing of any library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from guard.errors import GuardError


@contextmanager
def refusals(library: str, where: str) -> Iterator[None]:
    """Raise a library's error about values that it cannot use as a GuardError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        problem = f"{library} rejected these values: {error}"
        raise GuardError(problem, where=where, remedy="Correct them in the recipe") from error
