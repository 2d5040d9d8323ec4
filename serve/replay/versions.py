"""Which two versions of which rules are replayed, and whether one engine can serve both.

Version A of a rule is served as `RULE@A`, version B as `RULE@B`: two adapters on one base, so that
a conversation is prefilled once for both. Knows nothing of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.method import METHODS, method_named
from guard.recipe import load_recipe
from guard.weights.card import CARD, Card, load_card
from serve.engine.adapter import Requirements
from serve.engine.backends.arguments import stated_max_rank
from serve.selection import ServedPart


@dataclass(frozen=True)
class RuleVersion:
    """A folder of weights and its card, under the name that the engine serves it by."""

    name: str
    folder: Path
    card: Card


@dataclass(frozen=True)
class VersionPair:
    """Two versions of one rule's weights."""

    rule: str
    a: RuleVersion
    b: RuleVersion

    @property
    def is_unchanged(self) -> bool:
        """Whether both answer alike: they are one version."""
        return self.a.card.version == self.b.card.version

    @property
    def shares_prefill(self) -> bool:
        """Whether both act behind the conversation, which is then computed once."""
        methods = {self.a.card.method, self.b.card.method}
        return all(METHODS[method].shares_conversation for method in methods)

    @property
    def differences(self) -> list[str]:
        """The differences beside the weights that a reader has to know, each a sentence."""
        a, b = self.a.card, self.b.card
        sentences: list[str] = []
        if a.rule_text != b.rule_text:
            sentences.append(
                f"The rule's text differs: A reads “{a.rule_text}”, B reads “{b.rule_text}”."
            )
        if a.method != b.method:
            sentences.append(f"The method differs: A is {a.method}, B is {b.method}.")
        if a.reads != b.reads:
            sentences.append(f"What counts differs: A reads “{a.reads}”, B reads “{b.reads}”.")
        if not self.shares_prefill:
            sentences.append("A LoRA acts on the whole conversation: no prefill is shared with it.")
        if a.files == b.files:
            sentences.append("The weights are the same: only the card differs.")
        if a.threshold != b.threshold:
            sentences.append(f"The threshold differs: {a.threshold:.3f} and {b.threshold:.3f}.")
        if a.data_hash != b.data_hash:
            sentences.append("They were trained on different data.")
        return sentences


@dataclass(frozen=True)
class Versions:
    """The pairs to replay, the rules that one side alone has, and those that both have alike."""

    pairs: tuple[VersionPair, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


def find_versions(a: Path, b: Path, method: str | None = None) -> Versions:
    """The pairs that two folders hold: of weights (`runs/MODEL/RULE/METHOD`), or of rules
    (`runs/MODEL`), of which every rule that both have is a pair, by `method` or the first that both
    have; those that answer alike are named and left out.

    Raises GuardError where a folder holds no weights, two cannot stand side by side, or all answer
    alike.
    """
    if method is not None:
        method_named(method)
    a_is_weights, b_is_weights = (a / CARD).is_file(), (b / CARD).is_file()
    if a_is_weights != b_is_weights:
        rules, weights = (b, a) if a_is_weights else (a, b)
        _refuse_missing(rules)
        problem = "one is a folder of weights, the other a folder of rules"
        remedy = "Name two of a kind: runs/MODEL/RULE/METHOD, or runs/MODEL"
        raise GuardError(problem, where=rules, got=weights, remedy=remedy)
    if a_is_weights and method is not None:
        problem, remedy = "folders of weights say their method themselves", "Leave out METHOD="
        raise GuardError(problem, got=method, remedy=remedy)
    pairs = [_pair(a, b)] if a_is_weights else _pairs_of_rules(a, b, method)
    changed = [pair for pair in pairs if not pair.is_unchanged]
    if not changed:
        remedy = "What training replaced is RULE/before/METHOD"
        raise GuardError("A and B are the same weights", where=b, got=a, remedy=remedy)
    if a_is_weights:
        return Versions(tuple(changed))
    rules_a, rules_b = _rules(a), _rules(b)
    return Versions(
        tuple(changed),
        only_a=tuple(rule for rule in rules_a if rule not in rules_b),
        only_b=tuple(rule for rule in rules_b if rule not in rules_a),
        unchanged=tuple(pair.rule for pair in pairs if pair.is_unchanged),
    )


def replayed_parts(versions: Versions) -> list[ServedPart]:
    """The parts to serve: for each base, both versions of its rules.

    Every folder is checked as the engine will check it. Raises GuardError for one that it would
    refuse.
    """
    by_model: dict[str, list[VersionPair]] = {}
    for pair in versions.pairs:
        by_model.setdefault(pair.b.card.model, []).append(pair)
    parts: list[ServedPart] = []
    for model, pairs in by_model.items():
        recipe = load_recipe(model)
        requirements = Requirements.of(recipe, stated_max_rank(recipe, {}))
        folders: dict[str, Path] = {}
        for pair in pairs:
            for version in (pair.a, pair.b):
                requirements.admit(version.name, version.folder)
                folders[version.name] = version.folder
        parts.append(ServedPart(recipe, pairs[0].b.card.method, folders))
    return parts


def _pair(a: Path, b: Path) -> VersionPair:
    """The pair. Raises GuardError if the two cannot be served, or told apart, side by side."""
    card_a, card_b = load_card(a), load_card(b)
    if card_a.rule != card_b.rule:
        raise GuardError(
            "the two adapters answer different rules",
            where=b,
            got=f"{card_a.rule} and {card_b.rule}",
            remedy="Name two versions of one rule",
        )
    bases = [f"{card.base} {card.base_revision[:12]}" for card in (card_a, card_b)]
    if bases[0] != bases[1]:
        raise GuardError(
            "the two adapters are on different bases: no prefill serves both",
            where=b,
            got=" and ".join(bases),
            remedy="Compare their verdicts on labelled rows instead: make compare",
        )
    rule = card_a.rule
    version_a = RuleVersion(f"{rule}@A", a, card_a)
    return VersionPair(rule, version_a, RuleVersion(f"{rule}@B", b, card_b))


def _pairs_of_rules(a: Path, b: Path, method: str | None) -> list[VersionPair]:
    """A pair of every rule that both folders have. Raises GuardError if there is none."""
    rules_a, rules_b = _rules(a), _rules(b)
    pairs: list[VersionPair] = []
    for rule in rules_a:
        if rule in rules_b:
            chosen = _method_of_both(rule, rules_a[rule], rules_b[rule], method)
            pairs.append(_pair(rules_a[rule][chosen], rules_b[rule][chosen]))
    if not pairs:
        got = f"{', '.join(rules_a)} and {', '.join(rules_b)}"
        remedy = "Name two folders of the same rules"
        raise GuardError("the two folders have no rule in common", where=b, got=got, remedy=remedy)
    names = [pair.rule for pair in pairs]
    if len(set(names)) < len(names):
        remedy = "Keep one folder per rule"
        raise GuardError("two folders hold one rule", where=b, got=", ".join(names), remedy=remedy)
    return pairs


def _refuse_missing(folder: Path) -> None:
    if not folder.is_dir():
        remedy = "Name a folder of weights: runs/MODEL/RULE/METHOD"
        raise GuardError("no such folder", where=folder, remedy=remedy)


def _rules(folder: Path) -> dict[str, dict[str, Path]]:
    """The folders of weights by rule and method. Raises GuardError if there is none."""
    _refuse_missing(folder)
    rules: dict[str, dict[str, Path]] = {}
    for card in sorted(folder.glob(f"*/*/{CARD}")):
        if card.parent.name in METHODS:
            rules.setdefault(card.parent.parent.name, {})[card.parent.name] = card.parent
    if not rules:
        remedy = "Name runs/MODEL/RULE/METHOD, or runs/MODEL for all its rules"
        raise GuardError(f"no {CARD}, and none in RULE/METHOD", where=folder, remedy=remedy)
    return rules


def _method_of_both(rule: str, a: dict[str, Path], b: dict[str, Path], method: str | None) -> str:
    """The method that both folders have for the rule. Raises GuardError if there is none."""
    common_methods = [name for name in _preferred(a) if name in b]
    if method is not None:
        common_methods = [name for name in common_methods if name == method]
    if not common_methods:
        got = f"{', '.join(a)} and {', '.join(b)}"
        remedy = "Name the two folders of weights themselves"
        problem = f"the two folders have no method in common for {rule}"
        raise GuardError(problem, got=got, remedy=remedy)
    return common_methods[0]


def _preferred(methods: Iterable[str]) -> list[str]:
    """The methods, those that a server prefers first: adapters that share conversations."""

    def rank(name: str) -> tuple[bool, bool]:
        return not METHODS[name].is_adapter, not METHODS[name].shares_conversation

    return sorted(methods, key=rank)
