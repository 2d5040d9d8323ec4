"""Where tests keep what is to be served. Tests only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from guard.weights.card import Card
from serve.registry.rollout import Rollout, TrialVersion
from serve.registry.source import RolloutSource


class Found(RolloutSource):
    """What `find` has for a rule, and the versions that were taken back."""

    def __init__(self, find: Callable[[str], Path | Rollout | None]) -> None:
        self._find = find
        self.aborted: list[tuple[str, str, str]] = []  # rules, versions, reasons

    def find(self, rule: str, served: Card | None = None) -> Rollout | None:
        found = self._find(rule)
        return Rollout(folder=found) if isinstance(found, Path) else found

    def abort(self, served: Card, trial: TrialVersion, reason: str) -> None:
        self.aborted.append((served.rule, trial.version, reason))
