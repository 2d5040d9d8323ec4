"""What a caller may ask: the rules that are served, and rule sets of them.

Knows nothing of engines and of what a caller sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from guard.errors import did_you_mean
from guard.weights.card import Card
from serve.policy.rule_set import RuleSet

LONGEST_HINTED = 100  # characters of a name; comparing longer ones takes long


class SelectedCards(Mapping[str, Card]):
    """The cards of these rules as they are now: a rule may be replaced while it is served."""

    def __init__(self, cards: Mapping[str, Card], rules: Iterable[str]) -> None:
        self._cards, self._rules = cards, dict.fromkeys(rules)

    def __getitem__(self, rule: str) -> Card:
        if rule not in self._rules:
            raise KeyError(rule)
        return self._cards[rule]  # which is served: no rule of a rule set is removed

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


@dataclass(frozen=True)
class Catalogue:
    """Rules, with their cards as they are now, and rule sets, by name."""

    rules: Mapping[str, Card]
    rule_sets: Mapping[str, RuleSet]

    def limited_to(self, names: Sequence[str]) -> Catalogue:
        rule_sets = {name: self.rule_sets[name] for name in names}
        rules: list[str] = []
        for rule_set in rule_sets.values():
            rules += rule_set.rules
        return Catalogue(SelectedCards(self.rules, rules), rule_sets)

    def nearest_rule(self, name: str) -> str:
        """The remedy for an unknown name: the nearest rule, and where all are listed."""
        return _nearest(name, self.rules, "/v1/rules")

    def nearest_rule_set(self, name: str) -> str:
        return _nearest(name, self.rule_sets, "/v1/rule_sets")

    def card(self, rule: str) -> Card:
        """The card of a rule that is served. Raises HTTPException 404 if it is not."""
        if rule not in self.rules:
            raise HTTPException(404, f"the rule {rule!r} is not served; {self.nearest_rule(rule)}")
        return self.rules[rule]

    def rule_set(self, name: str) -> RuleSet:
        """The rule set of this name. Raises HTTPException 404 if there is none."""
        if name not in self.rule_sets:
            nearest = self.nearest_rule_set(name)
            raise HTTPException(404, f"there is no rule set {name!r}; {nearest}")
        return self.rule_sets[name]

    def selected(self, rules: Sequence[str] | None, rule_set: str | None = None) -> RuleSet:
        """The rule set of this name, or one that is violated where any of these rules is, by
        default any rule. Raises HTTPException 404 for what is not served, 422 for both.
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


def _nearest(name: str, names: Iterable[str], path: str) -> str:
    hint = ""
    if len(name) <= LONGEST_HINTED:
        hint = did_you_mean(name, names)
    return f"{hint} GET {path} lists them".lstrip()
