"""Version 0 of a rule: what judges it before it has weights of its own. The recipe's reader does,
or else the bare base, by yes and no. Knows nothing of where versions are kept.
"""

from __future__ import annotations

from typing import Any

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from guard.rule import text_hash
from guard.weights.card import Card
from guard.weights.head import answer_hash

# Nobody has calibrated the bare base: it is never sure.
UNCALIBRATED: dict[str, Any] = {
    "temperature": 1.0,
    "bias": 0.0,
    "threshold": 0.5,
    "uncertainty_band": (0.0, 1.0),
}
UNTRAINED: dict[str, Any] = {"data_hash": "none", "test_sha256": "none", "seed": 0, "max_fpr": None}
UNTRAINED |= {"recipe": {}, "versions": {}, "metrics": {}, "coverage": None, "files": {}}


def card_of_reader(reader: Card, rule: str, text: str) -> Card:
    """The reader's card for a rule of this text. Its metrics are of other rules."""
    return reader.model_copy(update=_words(rule, text) | {"metrics": {}, "untrained": "reader"})


def card_of_base(recipe: Recipe, prompts: PromptBuilder, method: str, rule: str, text: str) -> Card:
    """The card of the bare base as the judge of a rule, until weights of this method are. Raises
    GuardError for an encoder.
    """
    if recipe.is_encoder:
        problem, remedy = "an encoder judges no rule without weights", "Run `make train` for it"
        raise GuardError(problem, where=f"recipe {recipe.name}", got=rule, remedy=remedy)
    identity = identity_of(recipe, prompts, method, rule, text)
    return Card(**UNTRAINED | UNCALIBRATED | identity, untrained="base")


def identity_of(
    recipe: Recipe, prompts: PromptBuilder, method: str, rule: str, text: str
) -> dict[str, Any]:
    """The fields of a card that say which rule's weights of which base these are."""
    base = {"model": recipe.name, "base": recipe.base, "base_revision": recipe.base_revision}
    read = {"prompt_hash": prompts.hash, "answer_hash": answer_hash(), "method": method}
    return base | read | _words(rule, text)


def _words(rule: str, text: str) -> dict[str, Any]:
    return {"rule": rule, "rule_text": text, "rule_hash": text_hash(text)}
