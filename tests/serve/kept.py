"""A registry whose versions have words instead of weights, and who serves them. Tests only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from guard.layout import Runs
from guard.weights.card import Card
from serve.registry.change import PreparedChange, RolloutChange, prepared
from serve.registry.history import RuleHistory, history
from serve.registry.registry import Alias, RegisteredRule, Registry, Version
from serve.registry.rollout import Rollout, TrialVersion
from serve.registry.source import RolloutSource
from tests.serve.cluster.words_engine import save_words


class KeptVersions(RolloutSource):
    """The registry as RegisteredRollouts reads it, which admits what no model could load."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = Runs(root / "runs")
        self.registry = Registry(self.runs)

    def train(self, rule: str, weights: bytes) -> Version:
        folder = save_words(self.root / "trained" / rule, weights)
        return self.registry.register(folder, actor="ann", note=weights.decode())

    def aliases(self, rule: str) -> Mapping[Alias, str]:
        return self.registry.aliases(RegisteredRule("tiny", rule, "alora"))

    def champion(self, rule: str) -> str:
        return self.aliases(rule)["champion"]

    def find(self, rule: str, served: Card | None = None) -> Rollout | None:
        return self.registry.rollout(RegisteredRule("tiny", rule, "alora"))

    def abort(self, served: Card, trial: TrialVersion, reason: str) -> None:
        self.registry.abort(RegisteredRule.of(served), trial, actor="gate", reason=reason)

    def history(self, served: Card) -> RuleHistory:
        return history(self.registry, RegisteredRule.of(served))

    def prepare(self, served: Card, change: RolloutChange) -> PreparedChange:
        rule = RegisteredRule.of(served)
        return prepared(self.registry, self.runs, rule, change, lambda name, folder: None)
