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
            self._refuse_unknown(rules or (), unknown)
            return RuleSet.any_of(self.rules if rules is None else rules)
        if rules is not None:
            raise HTTPException(422, "name a rule set or rules, not both")
        if rule_set not in self.rule_sets:
            nearest = _nearest(rule_set, self.rule_sets, "/v1/rule_sets")
            raise HTTPException(unknown, f"rule_set: there is no {rule_set!r}; {nearest}")
        return self.rule_sets[rule_set]

    def _refuse_unknown(self, rules: Sequence[str], status: int) -> None:
        unknown = [rule for rule in rules if rule not in self.rules]
        if unknown:
            nearest = _nearest(unknown[0], self.rules, "/v1/rules")
            raise HTTPException(status, f"rules: not served: {', '.join(unknown)}; {nearest}")


def _nearest(name: str, names: Iterable[str], path: str) -> str:
    """The remedy for an unknown name: the nearest one, and where all are listed."""
    hint = ""
    if len(name) <= LONGEST_HINTED:
        hint = did_you_mean(name, names)
    return f"{hint} GET {path} lists them".lstrip()
