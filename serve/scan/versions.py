"""Which two versions of a rule are replayed, and whether one engine can serve both.

Version A is served as `RULE@A`, version B as `RULE@B`: two adapters on one base, so that a
conversation is prefilled once for both. Knows nothing of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import load_recipe
from guard.weights.card import Card, load_card
from serve.engine.adapter import Requirements
from serve.selection import ServedPart

# Of a card: what makes two versions of it answer differently beside the weights.
COMPARED = {
    "rule_text": "The rule's text",
    "method": "The method",
    "reads": "What counts",
    "threshold": "The threshold",
}


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


def find_pair(a: Path, b: Path) -> VersionPair:
    """The pair. Raises GuardError if the two cannot be served, or told apart, side by side."""
    for folder in (a, b):
        if not folder.is_dir():
            remedy = "Name runs/MODEL/RULE/METHOD; `make rules` names the folders of older versions"
            raise GuardError("no such folder", where=folder, remedy=remedy)
    card_a, card_b = load_card(a), load_card(b)
    rule = card_a.rule
    if rule != card_b.rule:
        problem, got = "the two adapters answer different rules", f"{rule} and {card_b.rule}"
        raise GuardError(problem, where=b, got=got, remedy="Name two versions of one rule")
    bases = [f"{card.base} {card.base_revision[:12]}" for card in (card_a, card_b)]
    if bases[0] != bases[1]:
        problem = "the two adapters are on different bases: no prefill serves both"
        remedy = "`make curve MODEL=…,…` puts two bases side by side"
        raise GuardError(problem, where=b, got=" and ".join(bases), remedy=remedy)
    if card_a.version == card_b.version:
        remedy = "`make rules` names the folders of older versions"
        raise GuardError("A and B are the same weights", where=b, got=a, remedy=remedy)
    return VersionPair(
        rule, RuleVersion(f"{rule}@A", a, card_a), RuleVersion(f"{rule}@B", b, card_b)
    )


def replayed_part(pair: VersionPair) -> ServedPart:
    """Both versions as they are served. Raises GuardError for one that the engine would refuse."""
    recipe = load_recipe(pair.b.card.model)
    requirements = Requirements.of(recipe)
    folders: dict[str, Path] = {}
    for version in (pair.a, pair.b):
        requirements.admit(version.name, version.folder)
        folders[version.name] = version.folder
    return ServedPart(recipe, pair.b.card.method, folders)
