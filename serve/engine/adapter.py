"""A folder that may be served: what its card and its configuration say. Knows nothing of vLLM or of
an adapter's tensors.

Checked before an engine starts, so that a wrong folder costs milliseconds. An adapter's tensors are
checked when they are loaded; a head is its tensors (`head.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guard.card import Card, load_card
from guard.errors import GuardError
from guard.layout import Runs
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Kind, Recipe
from guard.rule import text_hash
from serve.engine.head import ServableHead, load_classifier, load_head


@dataclass(frozen=True)
class ServableAdapter:
    """A checked adapter folder under the name it is served by.

    `modules` are the last names of its layers; empty where its configuration has a pattern for
    them. `head`, of an encoder's, reads the states that the adapter makes.
    """

    name: str
    folder: Path
    card: Card
    modules: frozenset[str]
    head: ServableHead | None = field(default=None, compare=False)  # the card names its weights

    @property
    def shares_conversation(self) -> bool:
        """Whether its weights act from the suffix on, so that the conversation is computed with
        base weights.
        """
        return METHODS[self.card.method].shares_conversation


@dataclass(frozen=True)
class Requirements:
    """What an engine demands of the folders it serves."""

    base: str
    base_revision: str
    max_rank: int
    prompts: PromptBuilder
    kind: Kind = "decoder"

    @classmethod
    def of(cls, recipe: Recipe, max_rank: int | None = None) -> Requirements:
        """What an engine of this recipe demands. Raises GuardError if its base is not there."""
        prompts = prompt_builder(recipe)
        rank = max_rank or recipe.max_rank
        return cls(recipe.base, recipe.base_revision, rank, prompts, recipe.kind)

    def admit(self, name: str, folder: Path) -> ServableAdapter | ServableHead:
        """The adapter or head in `folder`. Raises GuardError naming the check it fails."""
        card = load_card(folder)
        self._check_card(card, folder)
        if not METHODS[card.method].is_adapter:
            return load_head(name, folder, card)
        path = folder / "adapter_config.json"
        config = self._config(path, card)
        self._check_invocation(config, card, path)
        targets = config.get("target_modules")
        modules = frozenset[str](targets) if isinstance(targets, list) else frozenset[str]()
        head = None
        if self.kind == "encoder":
            head = load_classifier(name, folder, card)
        return ServableAdapter(name, folder, card, modules, head)

    def _check_card(self, card: Card, folder: Path) -> None:
        remedy = _remedy(card)
        if (card.base, card.base_revision) != (self.base, self.base_revision):
            got = f"{card.base} {card.base_revision[:12]}"
            raise GuardError("trained on another base", where=folder, got=got, remedy=remedy)
        if card.rule_hash != text_hash(card.rule_text):
            problem = "the card's rule text is not the one its hash names"
            raise GuardError(problem, where=folder, got=card.rule_hash[:12], remedy=remedy)
        if card.prompt_hash != self.prompts.hash:
            problem = "trained on another wording or layout of the prompt"
            raise GuardError(problem, where=folder, got=card.prompt_hash[:12], remedy=remedy)

    def _config(self, path: Path, card: Card) -> dict[str, Any]:
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            remedy = _remedy(card)
            raise GuardError(f"cannot be read: {error}", where=path, remedy=remedy) from error
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise GuardError("not a LoRA adapter", where=path, remedy=_remedy(card))
        rank = config.get("r")
        if not isinstance(rank, int) or not 1 <= rank <= self.max_rank:
            problem = f"the rank must be between 1 and {self.max_rank}"
            remedy = (
                "Raise max_lora_rank in the recipe's engine section, or train with a lower rank"
            )
            raise GuardError(problem, where=path, got=rank, remedy=remedy)
        return config

    def _check_invocation(self, config: dict[str, Any], card: Card, path: Path) -> None:
        """PEFT and vLLM would not find another invocation and answer with the base, as if that were
        a verdict.
        """
        invocation = tuple(config.get("alora_invocation_tokens") or ())
        expected: tuple[int, ...] = ()
        if METHODS[card.method].shares_conversation:
            expected = self.prompts.invocation(card.rule_text)
        if invocation != expected:
            problem = f"an adapter of method '{card.method}' must have the invocation tokens"
            problem += f" {list(expected)}"
            raise GuardError(problem, where=path, got=list(invocation), remedy=_remedy(card))


def trained(runs: Runs, model: str, method: str, selection: str | None = None) -> dict[str, Path]:
    """The folders of a method that serve (seed 0), by rule: all, or those of a comma-separated
    `selection`.

    Raises GuardError if there is none, or one of the selection is not trained.
    """
    cards = sorted((runs.root / model).glob(f"*/{method}/card.json"))
    folders = {card.parent.parent.name: card.parent for card in cards}
    if not folders:
        raise GuardError(
            f"no rule is trained by method '{method}'",
            where=runs.root / model,
            remedy=f"Run `make train RULE=... MODEL={model} METHOD={method}` first",
        )
    if selection is None:
        return folders
    names = [name.strip() for name in selection.split(",") if name.strip()]
    missing = [name for name in names if name not in folders]
    if missing or not names:
        raise GuardError(
            f"a rule that is not trained by method '{method}'",
            got=", ".join(missing) or selection,
            remedy=f"Trained: {', '.join(folders)}; or run "
            f"`make train RULE=... MODEL={model} METHOD={method}`",
        )
    return {name: folders[name] for name in names}


def _remedy(card: Card) -> str:
    return f"Train it again: `{card.retrain}`"
