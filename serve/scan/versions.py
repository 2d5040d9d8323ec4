"""Which two versions of which rules are replayed, and whether one engine can serve both.

Version A of a rule is served as `RULE@A`, version B as `RULE@B`: two adapters on one base, so that
a conversation is prefilled once for both. Knows nothing of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from guard.errors import GuardError
from guard.method import METHODS, method_named
from guard.recipe import load_recipe
from guard.weights.card import CARD, Card, check_rule, load_card
from serve.engine.adapter import Requirements
from serve.selection import ServedPart

NAME_WEIGHTS = "Name runs/MODEL/RULE/METHOD, or runs/MODEL for all its rules"
# Of a card: what makes two versions of it answer differently beside the weights.
COMPARED = {
    "rule_text": "The rule's text",
    "method": "The method",
    "reads": "What counts",
    "threshold": "The threshold",
}
# As a server prefers them: adapters that share conversations first.
METHODS_IN_ORDER = sorted(
    METHODS, key=lambda name: (not METHODS[name].is_adapter, not METHODS[name].shares_conversation)
)


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
        for field, name in COMPARED.items():
            of_a, of_b = getattr(a, field), getattr(b, field)
            if of_a != of_b:
                sentences.append(f"{name} differs: A has “{of_a}”, B has “{of_b}”.")
        if not self.shares_prefill:
            sentences.append("A LoRA acts on the whole conversation: no prefill is shared with it.")
        if a.files == b.files:
            sentences.append("The weights are the same: only the card differs.")
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
    (`runs/MODEL`), of which every rule that both have is a pair, by `method` or the one that a
    server prefers.

    Raises GuardError where a folder holds no weights, two cannot stand side by side, or all answer
    alike.
    """
    for folder in (a, b):
        if not folder.is_dir():
            raise GuardError("no such folder", where=folder, remedy=NAME_WEIGHTS)
    if not ((a / CARD).is_file() and (b / CARD).is_file()):
        versions = _of_rules(a, b, method)
    elif method is not None:
        problem, remedy = "folders of weights say their method themselves", "Leave out METHOD="
        raise GuardError(problem, got=method, remedy=remedy)
    else:
        versions = Versions((_pair(a, b),))
    changed = tuple(pair for pair in versions.pairs if not pair.is_unchanged)
    if not changed:
        remedy = "`make rules` names the folders of older versions"
        raise GuardError("A and B are the same weights", where=b, got=a, remedy=remedy)
    unchanged = tuple(pair.rule for pair in versions.pairs if pair.is_unchanged)
    return replace(versions, pairs=changed, unchanged=unchanged)


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
        requirements = Requirements.of(recipe)
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
    rule = card_a.rule
    if rule != card_b.rule:
        raise GuardError(
            "the two adapters answer different rules",
            where=b,
            got=f"{rule} and {card_b.rule}",
            remedy="Name two versions of one rule",
        )
    bases = [f"{card.base} {card.base_revision[:12]}" for card in (card_a, card_b)]
    if bases[0] != bases[1]:
        raise GuardError(
            "the two adapters are on different bases: no prefill serves both",
            where=b,
            got=" and ".join(bases),
            remedy="`make eval MODEL=…,…` puts two bases side by side",
        )
    return VersionPair(
        rule, RuleVersion(f"{rule}@A", a, card_a), RuleVersion(f"{rule}@B", b, card_b)
    )


def _of_rules(a: Path, b: Path, method: str | None) -> Versions:
    """A pair of every rule that both folders have. Raises GuardError if there is none."""
    methods = METHODS_IN_ORDER
    if method is not None:
        methods = [method_named(method).name]
    rules_a, rules_b = _rules(a), _rules(b)
    pairs: list[VersionPair] = []
    for rule in (rule for rule in rules_a if rule in rules_b):
        common = [name for name in methods if name in rules_a[rule] & rules_b[rule]]
        if not common:
            problem = f"the two folders have no method in common for {rule}"
            remedy = "Name the two folders of weights themselves"
            raise GuardError(problem, where=b, remedy=remedy)
        pair = _pair(a / rule / common[0], b / rule / common[0])
        check_rule(pair.a.card, rule, pair.a.folder)
        pairs.append(pair)
    if not pairs:
        got = f"{', '.join(rules_a)} and {', '.join(rules_b)}"
        remedy = "Name two folders of the same rules"
        raise GuardError("the two folders have no rule in common", where=b, got=got, remedy=remedy)
    only_a = tuple(rule for rule in rules_a if rule not in rules_b)
    only_b = tuple(rule for rule in rules_b if rule not in rules_a)
    return Versions(tuple(pairs), only_a, only_b)


def _rules(folder: Path) -> dict[str, set[str]]:
    """The methods that each rule has weights of. Raises GuardError if there is none."""
    if (folder / CARD).is_file():
        problem = "one is a folder of weights, the other a folder of rules"
        raise GuardError(problem, where=folder, remedy="Name two of a kind")
    rules: dict[str, set[str]] = {}
    for card in sorted(folder.glob(f"*/*/{CARD}")):
        if card.parent.name in METHODS:
            rules.setdefault(card.parent.parent.name, set()).add(card.parent.name)
    if not rules:
        problem = f"no {CARD}, and none in RULE/METHOD"
        raise GuardError(problem, where=folder, remedy=NAME_WEIGHTS)
    return rules
