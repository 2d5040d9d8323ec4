"""Where it stands what of each rule is to be served, for those who serve it."""

from __future__ import annotations

from collections.abc import Collection

from guard.errors import GuardError
from guard.weights.card import Card
from serve.registry.change import PreparedChange, RolloutChange
from serve.registry.history import RuleHistory
from serve.registry.rollout import Rollout, TrialVersion


class RolloutSource:
    """What is to be served, and how that is decided; this one knows of nothing."""

    def find(self, rule: str, served: Card | None = None) -> Rollout | None:
        """What is to be served of a rule, by the card that serves it, if any, and its weights."""
        return None

    def unserved(self, served: Collection[str]) -> dict[str, int]:
        """Rules that could be judged although they are not among those `served` and have no
        weights; of each when its file changed, in ns.
        """
        return {}

    def abort(self, served: Card, trial: TrialVersion, reason: str) -> None:
        """Note that a trial beside the champion `served` is over. Raises GuardError if that cannot
        be noted.
        """

    def history(self, served: Card) -> RuleHistory:
        """The versions and events of the rule that this card serves, if it has any."""
        return RuleHistory()

    def prepare(self, served: Card, change: RolloutChange) -> PreparedChange:
        """A decision about the rule that this card serves. Raises GuardError for one that could not
        be served.
        """
        raise GuardError("no versions are kept of what is served here")
