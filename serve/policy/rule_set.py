"""Named rule sets, from a YAML file:

    rule_sets:
      support:
        rules: [medical_advice, pii_leak, refund_promise, angry_customer]
        unseen_language: unjudged      # optional; by default its verdicts are not confident
        violated_if:                   # optional; by default, if any of the rules is violated
          any_of:
            - medical_advice
            - {rule: pii_leak, unless: {metadata: {audience: internal}}}
            - all_of: [refund_promise, angry_customer]

`logic.py` says what `violated_if` can be. Every mistake in the file is found when it is read.
Knows nothing of what the rules say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from guard.errors import GuardError, choose_from
from guard.files.yaml_file import Strict, load
from serve.policy.logic import (
    MAX_METADATA,
    Connective,
    Decision,
    Expression,
    Facts,
    any_rule,
    parse,
)
from serve.policy.ruling import Ruling, any_of

# What a rule says of a language that its validation rows do not have.
UnseenLanguage = Literal["not_confident", "unjudged"]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]


@dataclass(frozen=True)
class RuleSet:
    """Rules that are asked together, and when the whole is violated.

    `name` is None for a set that is in no file.
    """

    rules: tuple[str, ...]
    violated_if: Expression
    name: str | None = None
    unseen_language: UnseenLanguage = "not_confident"

    @classmethod
    def any_of(cls, rules: Iterable[str]) -> RuleSet:
        """Violated if any of the rules is."""
        names = tuple(dict.fromkeys(rules))
        return cls(names, any_rule(names))

    def or_any_of(self, names: Sequence[str]) -> RuleSet:
        """This set, violated also where anything of these names is."""
        if not names:
            return self
        violated_if = any_rule(names)
        if self.rules:
            violated_if = Connective(any_of, (self.violated_if, violated_if))
        return replace(self, rules=(*self.rules, *names), violated_if=violated_if)

    def decide(self, rulings: Mapping[str, Ruling], metadata: Mapping[str, str]) -> Decision:
        """The decision by the rules' rulings and the request's metadata."""
        return self.violated_if.evaluate(Facts(rulings, metadata))


class RuleSetEntry(Strict):
    """A rule set as the file has it."""

    description: str = ""
    rules: Annotated[list[str], Field(min_length=1)]
    violated_if: Any = None
    unseen_language: UnseenLanguage = "not_confident"


class RuleSetFile(Strict):
    """The file of rule sets."""

    rule_sets: Annotated[dict[Name, RuleSetEntry], Field(min_length=1)]


def load_rule_sets(path: Path, served: Collection[str]) -> dict[str, RuleSet]:
    """The rule sets of a file, for a server of the rules `served`, by name.

    Raises GuardError for whatever is wrong with it, also for a rule that is not served.
    """
    rule_sets = {}
    for name, entry in load(path, RuleSetFile).rule_sets.items():
        where = f"{path}: rule_sets.{name}"
        if name in served:
            problem = "a rule set and a served rule share this name"
            remedy = "Give the rule set another name"
            raise GuardError(problem, where=where, got=name, remedy=remedy)
        _check_rules(entry.rules, served, f"{where}.rules")
        rule_sets[name] = _rule_set(name, entry, where)
    return rule_sets


def _check_rules(rules: list[str], served: Collection[str], where: str) -> None:
    for rule in rules:
        if rule not in served:
            remedy = f"{choose_from(rule, served)}. `make train` trains others"
            raise GuardError("the rule is not served", where=where, got=rule, remedy=remedy)
        if rules.count(rule) > 1:
            raise GuardError("named twice", where=where, got=rule, remedy="Name it once")


def _rule_set(name: str, entry: RuleSetEntry, where: str) -> RuleSet:
    """The entry as a rule set; its `rules` and its logic must name the same rules."""
    if entry.violated_if is None:
        return RuleSet(tuple(entry.rules), any_rule(entry.rules), name, entry.unseen_language)
    where = f"{where}.violated_if"
    violated_if = parse(entry.violated_if, where)
    for rule in sorted(violated_if.rules - set(entry.rules)):
        remedy = f"{choose_from(rule, entry.rules)}. Or add it to `rules`"
        raise GuardError("not one of the set's rules", where=where, got=rule, remedy=remedy)
    for rule in entry.rules:
        if rule not in violated_if.rules:
            problem = "listed in `rules` but not used in `violated_if`"
            remedy = "Use it in `violated_if`, or remove it from `rules`"
            raise GuardError(problem, where=where, got=rule, remedy=remedy)
    reads = violated_if.evaluate(Facts({}, {})).decided_by  # all of it, where nothing is known
    keys = set(reads) - violated_if.rules
    if len(keys) > MAX_METADATA:
        problem = f"conditions on more than the {MAX_METADATA} keys that a request can state"
        raise GuardError(problem, where=where, got=len(keys), remedy="Split the set")
    return RuleSet(tuple(entry.rules), violated_if, name, entry.unseen_language)
