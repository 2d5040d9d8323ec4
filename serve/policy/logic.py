"""Logic over verdicts: rules, conditions on a request's metadata, and how they are combined.

    pii_leak                                        the rule is violated
    {any_of: [...]}, {all_of: [...]}                of these, at least one; all
    {metadata: {channel: [email, chat]}}            the request's metadata say so
    {rule: refund_promise, unless: terms_quoted}    the one, and not the other; beside `any_of`,
                                                    `all_of` and `metadata` as well

A rule without a verdict is unjudged, and so is a condition on a key that the request does not
state: nobody gets a conversation allowed by leaving something out. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from guard.errors import GuardError, choose_from
from serve.policy.ruling import Ruling, all_of, any_of

MAX_DEPTH = 16  # of combinations inside one another
MAX_METADATA = 32  # keys that a request states
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 200
KINDS = ("rule", "any_of", "all_of", "metadata")
KEYS = (*KINDS, "unless")


class Facts(NamedTuple):
    """What is known of a request: its rules' rulings, and the metadata that it states."""

    rulings: Mapping[str, Ruling]
    metadata: Mapping[str, str]


class Decision(NamedTuple):
    """A ruling, and the rules and metadata (`metadata.KEY`) that it rests on.

    A violation or an allow stays what it is, whatever the others say. An unjudged ruling rests on
    what would have to be judged.
    """

    ruling: Ruling
    decided_by: tuple[str, ...]


class Expression(Protocol):
    """What can hold, be violated, or be unjudged."""

    @property
    def rules(self) -> frozenset[str]:
        """The rules whose verdicts it reads."""
        ...

    def evaluate(self, facts: Facts) -> Decision: ...


@dataclass(frozen=True)
class RuleTerm:
    """A rule is violated."""

    name: str

    @property
    def rules(self) -> frozenset[str]:
        return frozenset({self.name})

    def evaluate(self, facts: Facts) -> Decision:
        ruling = facts.rulings.get(self.name, Ruling.UNJUDGED)
        return Decision(ruling, (self.name,))


@dataclass(frozen=True)
class MetadataTerm:
    """A key of the metadata has one of these values."""

    key: str
    values: frozenset[str]

    @property
    def rules(self) -> frozenset[str]:
        return frozenset()

    def evaluate(self, facts: Facts) -> Decision:
        """A violation if the key has one of the values; unjudged without the key."""
        ruling = Ruling.UNJUDGED
        if self.key in facts.metadata:
            ruling = Ruling.ALLOW
            if facts.metadata[self.key] in self.values:
                ruling = Ruling.VIOLATION
        return Decision(ruling, (f"metadata.{self.key}",))


@dataclass(frozen=True)
class Connective:
    """Several expressions by `any_of` or `all_of`."""

    combine: Callable[[Iterable[Ruling]], Ruling]
    parts: tuple[Expression, ...]

    @property
    def rules(self) -> frozenset[str]:
        rules: frozenset[str] = frozenset()
        for part in self.parts:
            rules |= part.rules
        return rules

    def evaluate(self, facts: Facts) -> Decision:
        """The combined ruling, decided by the parts whose ruling is the same."""
        decisions = [part.evaluate(facts) for part in self.parts]
        ruling = self.combine(decision.ruling for decision in decisions)
        decided_by: dict[str, None] = {}
        for decision in decisions:
            if decision.ruling is ruling:
                decided_by |= dict.fromkeys(decision.decided_by)
        return Decision(ruling, tuple(decided_by))


@dataclass(frozen=True)
class Negation:
    """An expression does not hold."""

    negated: Expression

    @property
    def rules(self) -> frozenset[str]:
        return self.negated.rules

    def evaluate(self, facts: Facts) -> Decision:
        decision = self.negated.evaluate(facts)
        return Decision(decision.ruling.opposite, decision.decided_by)


def any_rule(names: Iterable[str]) -> Expression:
    """At least one of these rules is violated."""
    return Connective(any_of, tuple(RuleTerm(name) for name in names))


def parse(content: Any, where: str, depth: int = 0) -> Expression:
    """The expression that `content`, from YAML, says. Raises GuardError where it says none."""
    if isinstance(content, str):
        return RuleTerm(content)
    if not isinstance(content, dict):
        problem = "neither a rule's name nor a mapping"
        raise GuardError(problem, where=where, got=repr(content)[:60], remedy=_form())
    if depth >= MAX_DEPTH:
        raise GuardError(f"nested more than {MAX_DEPTH} deep", where=where, remedy="Split the set")
    kind = _kind(content, where)
    expression = _PARSERS[kind](content[kind], f"{where}.{kind}", depth)
    if "unless" in content:
        exception = parse(content["unless"], f"{where}.unless", depth + 1)
        expression = Connective(all_of, (expression, Negation(exception)))
    return expression


def _kind(content: Mapping[str, Any], where: str) -> str:
    """The one of KINDS that a mapping is. Raises GuardError for none, for two, and for others."""
    for key in content:
        if key not in KEYS:
            remedy = choose_from(str(key), KEYS)
            raise GuardError("unknown key", where=where, got=key, remedy=remedy)
    kinds = [kind for kind in KINDS if kind in content]
    if len(kinds) != 1:
        got = ", ".join(content) or "nothing"
        problem = f"needs exactly one of {', '.join(KINDS)}"
        raise GuardError(problem, where=where, got=got, remedy=_form())
    return kinds[0]


def _form() -> str:
    return f"Write a rule's name, or one of {', '.join(KINDS)}, with or without `unless`"


def _parts(content: Any, where: str, depth: int) -> tuple[Expression, ...]:
    if not isinstance(content, list) or not content:
        remedy = "Write a list of at least one rule"
        raise GuardError("not a list", where=where, got=repr(content)[:60], remedy=remedy)
    parts = []
    for index, part in enumerate(content):
        parts.append(parse(part, f"{where}.{index}", depth + 1))
    return tuple(parts)


def _metadata(content: Any, where: str, depth: int) -> Expression:
    """A condition for each key; all of them have to hold."""
    if not isinstance(content, dict) or not content:
        remedy = "Write `metadata: {key: value}` or `{key: [value, value]}`"
        raise GuardError("not a mapping", where=where, got=repr(content)[:60], remedy=remedy)
    terms = []
    for key, values in content.items():
        _check_text(key, MAX_METADATA_KEY, where)
        terms.append(MetadataTerm(key, _values(values, f"{where}.{key}")))
    return Connective(all_of, tuple(terms))


def _values(content: Any, where: str) -> frozenset[str]:
    """The texts that are listed, or the only one. Raises GuardError for anything but text."""
    values: Sequence[Any] = content if isinstance(content, list) else [content]
    for value in values:
        _check_text(value, MAX_METADATA_VALUE, where)
    if not values:
        raise GuardError("no value", where=where, got="[]", remedy="Write at least one")
    return frozenset(values)


def _check_text(content: Any, max_characters: int, where: str) -> None:
    """Raise GuardError for what no request can state."""
    if not isinstance(content, str):
        remedy = "Metadata are texts; numbers and true need quotes"
        raise GuardError("not a text", where=where, got=repr(content)[:60], remedy=remedy)
    if len(content) > max_characters:
        problem = f"longer than the {max_characters} characters that a request can state"
        raise GuardError(problem, where=where, got=repr(content)[:60], remedy="Shorten it")


_PARSERS: Mapping[str, Callable[[Any, str, int], Expression]] = {
    # An expression, so that anything can have an exception.
    "rule": lambda content, where, depth: parse(content, where, depth + 1),
    "any_of": lambda content, where, depth: Connective(any_of, _parts(content, where, depth)),
    "all_of": lambda content, where, depth: Connective(all_of, _parts(content, where, depth)),
    "metadata": _metadata,
}
