"""What a caller may ask: the rules that are served, and rule sets of them.

Knows nothing of engines and of what a caller sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from guard.errors import did_you_mean
from guard.weights.card import Card
from serve.policy.rule_set import RuleSet

LONGEST_HINTED = 100  # characters of a name; comparing longer ones takes long


@dataclass(frozen=True)
class Catalogue:
    """Rules, by default those of all `cards`, and rule sets, by name."""

    cards: Mapping[str, Card]  # of all that is served; a rule may be replaced meanwhile
    rule_sets: Mapping[str, RuleSet]
    only: tuple[str, ...] | None = None

    @property
    def rules(self) -> Mapping[str, Card]:
        """The rules' cards as they are now."""
        if self.only is None:
            return self.cards
        return {rule: self.cards[rule] for rule in self.only if rule in self.cards}

    def limited_to(self, names: Sequence[str]) -> Catalogue:
        rule_sets = {name: self.rule_sets[name] for name in names}
        rules = itertools.chain.from_iterable(rule_set.rules for rule_set in rule_sets.values())
        return Catalogue(self.cards, rule_sets, tuple(dict.fromkeys(rules)))

    def card(self, rule: str) -> Card:
        """The card of a rule that is served. Raises HTTPException 404 if it is not."""
        self._refuse_unknown([rule], 404)
        return self.rules[rule]

    def selected(
        self, rules: Sequence[str] | None, rule_set: str | None = None, *, unknown: int = 404
    ) -> RuleSet:
        """The rule set of this name, or one that is violated where any of these rules is, by
        default any rule. Raises HTTPException `unknown` for what is not served, 422 for both.
        """
        if rule_set is None:
            if rules is None:
                return RuleSet.any_of(self.rules)
            self._refuse_unknown(rules, unknown)
            return RuleSet.any_of(rules)
        if rules is not None:
            raise HTTPException(422, "name a rule set or rules, not both")
        if rule_set not in self.rule_sets:
            nearest = _nearest(rule_set, self.rule_sets, "/v1/rule_sets")
            raise HTTPException(unknown, f"rule_set: there is no {rule_set!r}; {nearest}")
        return self.rule_sets[rule_set]

    def _refuse_unknown(self, rules: Sequence[str], status: int) -> None:
        served = self.rules
        unknown = [rule for rule in rules if rule not in served]
        if unknown:
            nearest = _nearest(unknown[0], served, "/v1/rules")
            raise HTTPException(status, f"rules: not served: {', '.join(unknown)}; {nearest}")


def _nearest(name: str, names: Iterable[str], path: str) -> str:
    """The remedy for an unknown name: the nearest one, and where all are listed."""
    hint = ""
    if len(name) <= LONGEST_HINTED:
        hint = did_you_mean(name, names)
    return f"{hint} GET {path} lists them".lstrip()
