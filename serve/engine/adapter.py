"""An adapter folder that may be served: what its card and its configuration say. Knows nothing of vLLM or of tensors.

Checked before an engine starts, so that a wrong folder costs milliseconds. The tensors are checked when they are loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.card import Card, load_card
from guard.errors import GuardError
from guard.layout import Runs
from guard.prompt import PromptBuilder
from guard.recipe import Recipe
from guard.rule import text_hash


@dataclass(frozen=True)
class Adapter:
    """A checked adapter folder under the name it is served by. `modules`: the last names of its layers.

    None are known where its configuration has a pattern for them.
    """

    name: str
    folder: Path
    card: Card
    modules: frozenset[str]


@dataclass(frozen=True)
class Requirements:
    """What an engine demands of the adapters it serves."""

    base: str
    base_revision: str
    max_rank: int
    prompts: PromptBuilder

    @classmethod
    def of(cls, recipe: Recipe, max_rank: int | None = None) -> Requirements:
        """What an engine of this recipe demands. Raises GuardError if its base is not there."""
        prompts = PromptBuilder.of(recipe)
        return cls(
            recipe.base,
            recipe.base_revision,
            max_rank or recipe.engine.get("max_lora_rank", 16),
            prompts,
        )

    def admit(self, name: str, folder: Path) -> Adapter:
        """The adapter in `folder`. Raises GuardError naming the check it fails."""
        card = load_card(folder)
        again = f"Train it again: `{card.retrain}`"
        if (card.base, card.base_revision) != (self.base, self.base_revision):
            raise GuardError(
                "trained on another base",
                where=folder,
                got=f"{card.base} {card.base_revision[:12]}",
                remedy=again,
            )
        if card.rule_hash != text_hash(card.rule_text):
            raise GuardError(
                "the card's rule text is not the one its hash names",
                where=folder,
                got=card.rule_hash[:12],
                remedy=again,
            )
        if card.prompt_hash != self.prompts.hash:
            raise GuardError(
                "trained on another wording or layout of the prompt",
                where=folder,
                got=card.prompt_hash[:12],
                remedy=again,
            )
        config = self._config(folder / "adapter_config.json", card, again)
        targets = config.get("target_modules")
        return Adapter(name, folder, card, frozenset(targets if isinstance(targets, list) else ()))

    def _config(self, path: Path, card: Card, again: str) -> dict[str, Any]:
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GuardError(f"cannot be read: {error}", where=path, remedy=again) from error
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise GuardError("not a LoRA adapter", where=path, remedy=again)
        rank = config.get("r")
        if not isinstance(rank, int) or not 1 <= rank <= self.max_rank:
            remedy = (
                "Raise max_lora_rank in the recipe's engine section, or train with a lower rank"
            )
            raise GuardError(
                f"the rank must be between 1 and {self.max_rank}",
                where=path,
                got=rank,
                remedy=remedy,
            )
        invocation = tuple(config.get("alora_invocation_tokens") or ())
        expected = self.prompts.invocation(card.rule_text) if card.method == "alora" else ()
        if (
            invocation != expected
        ):  # PEFT and vLLM would not find it and answer with the base: that would look like a verdict
            what = f"an adapter of method '{card.method}' must have the invocation tokens {list(expected)}"
            raise GuardError(what, where=path, got=list(invocation), remedy=again)
        return config


def trained(runs: Runs, model: str, method: str, selection: str | None = None) -> dict[str, Path]:
    """The folders of the adapters that serve (seed 0), by rule: all that are trained, or those of a comma-separated `selection`.

    Raises GuardError if there is none, or one of the selection is not trained.
    """
    found = {
        card.parent.parent.name: card.parent
        for card in sorted((runs.root / model).glob(f"*/{method}/card.json"))
    }
    if not found:
        raise GuardError(
            f"no trained {method} adapter", where=runs.root / model, remedy="Run `make train` first"
        )
    if selection is None:
        return found
    names = [name.strip() for name in selection.split(",") if name.strip()]
    missing = [name for name in names if name not in found]
    if missing or not names:
        raise GuardError(
            "no trained adapter for this rule",
            got=", ".join(missing) or selection,
            remedy=f"Trained: {', '.join(found)}",
        )
    return {name: found[name] for name in names}
