"""What a caller may ask: the rules that are served, and rule sets of them.

Knows nothing of engines and of what a caller sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from guard.card import Card
from serve.policy.rule_set import RuleSet


@dataclass(frozen=True)
class Catalogue:
    """Rules, with their cards, and rule sets, by name."""

    rules: Mapping[str, Card]
    rule_sets: Mapping[str, RuleSet]

    def limited_to(self, names: Sequence[str]) -> Catalogue:
        """These rule sets and their rules alone."""
        rule_sets = {name: self.rule_sets[name] for name in names}
        rules = {}
        for rule_set in rule_sets.values():
            for rule in rule_set.rules:
                rules[rule] = self.rules[rule]
        return Catalogue(rules, rule_sets)

    def not_served(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are no rule."""
        return [name for name in names if name not in self.rules]

    def card(self, rule: str) -> Card:
        """The card of a rule that is served. Raises HTTPException 404 if it is not."""
        if rule not in self.rules:
            raise HTTPException(404, f"the rule {rule!r} is not served; GET /v1/rules lists them")
        return self.rules[rule]

    def rule_set(self, name: str) -> RuleSet:
        """The rule set of this name. Raises HTTPException 404 if there is none."""
        if name not in self.rule_sets:
            problem = f"there is no rule set {name!r}; GET /v1/rule_sets lists them"
            raise HTTPException(404, problem)
        return self.rule_sets[name]

    def selected(self, rules: Sequence[str] | None, rule_set: str | None = None) -> RuleSet:
        """A rule set by its name, or any of these rules, by default of all.

        Raises HTTPException 404 for what is not served, 422 for both.
        """
        if rule_set is not None:
            if rules is not None:
                raise HTTPException(422, "name a rule set or rules, not both")
            return self.rule_set(rule_set)
        if rules is None:
            return RuleSet.any_of(self.rules)
        for rule in rules:
            self.card(rule)
        return RuleSet.any_of(rules)
