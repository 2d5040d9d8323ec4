"""What the replicas serve, noted in a file that all of them read. Knows nothing of replicas.

A replica that starts later must answer by the weights of the others. So only versions of the
registry are noted: their folders bear the name of their content, which never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.weights.card import Card, check_rule, load_card
from serve.registry.registry import FOLDER_DIGITS
from serve.registry.rollout import Rollout

Served = dict[str, Rollout]  # what of each rule is served, by name
CONTENT = TypeAdapter(Served)


class ServedNote:
    """The file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, served: Mapping[str, Rollout]) -> None:
        """Note what is served, whole or not at all."""
        with atomic_write(self._path) as part:
            part.write_bytes(CONTENT.dump_json(dict(served), indent=2))

    def read(self) -> Served:
        """What is served. Raises GuardError if nothing was noted."""
        try:
            content = self._path.read_bytes()
        except OSError as error:
            problem = f"what is served cannot be read: {error.strerror}"
            remedy = "Start the server again"
            raise GuardError(problem, where=self._path, remedy=remedy) from error
        return CONTENT.validate_json(content)


def version_of(served: Mapping[str, Rollout]) -> str:
    """The version of these rules: equal where rules, weights, thresholds and modes are."""
    return hashlib.sha256(CONTENT.dump_json(dict(sorted(served.items())))).hexdigest()


def version_card(rule: str, folder: Path) -> Card:
    """The card of a rule's version.

    Raises GuardError for damaged weights, those of another rule, and those of no version.
    """
    card = load_card(folder)
    check_rule(card, rule, folder)
    if folder.name != card.version[:FOLDER_DIGITS]:
        problem = "replicas serve versions of the registry alone, and these weights are none"
        remedy = "Let runs/registry be written to, and start the server again"
        raise GuardError(problem, where=folder, remedy=remedy)
    return card
