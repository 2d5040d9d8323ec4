"""Version 0 of a rule: what judges it before it has weights of its own. The recipe's reader does,
or else the bare base, by yes and no. Knows nothing of where versions are kept.
"""

from __future__ import annotations

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from guard.rule import text_hash
from guard.weights.card import Card
from guard.weights.head import answer_hash

NEVER_SURE = (0.0, 1.0)  # nobody has calibrated the bare base
NO_DATA = "none"


def card_of_reader(reader: Card, rule: str, text: str) -> Card:
    """The reader's card for a rule of this text. Its metrics are of other rules."""
    stated = {"rule": rule, "rule_text": text, "rule_hash": text_hash(text)}
    return reader.model_copy(update=stated | {"metrics": {}, "untrained": "reader"})


def card_of_base(recipe: Recipe, prompts: PromptBuilder, method: str, rule: str, text: str) -> Card:
    """The card of the bare base as the judge of a rule, until weights of this method are. Raises
    GuardError for an encoder.
    """
    if recipe.is_encoder:
        problem, remedy = "an encoder judges no rule without weights", "Run `make train` for it"
        raise GuardError(problem, where=f"recipe {recipe.name}", got=rule, remedy=remedy)
    return Card(
        rule=rule,
        rule_text=text,
        rule_hash=text_hash(text),
        prompt_hash=prompts.hash,
        answer_hash=answer_hash(),
        method=method,
        model=recipe.name,
        base=recipe.base,
        base_revision=recipe.base_revision,
        data_hash=NO_DATA,
        test_sha256=NO_DATA,
        seed=0,
        recipe={},
        versions={},
        metrics={},
        temperature=1.0,
        bias=0.0,
        threshold=0.5,
        uncertainty_band=NEVER_SURE,
        coverage=None,
        max_fpr=None,
        files={},
        untrained="base",
    )
