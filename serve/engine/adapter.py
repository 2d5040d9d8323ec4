"""A folder that may be served: what its card and its configuration say. Checked before an engine
starts, so that a wrong folder costs milliseconds. An adapter's tensors are checked when they are
loaded; a head is its tensors (`head.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from guard.arguments import comma_separated
from guard.errors import GuardError
from guard.files.strict_json import load_json
from guard.layout import Runs
from guard.method import HEAD, METHODS, PEFT_CONFIG
from guard.prompt.builders import prompt_builder
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Kind, Recipe
from guard.rule import text_hash
from guard.weights.card import CARD, COMPOSITION, Card, load_card
from guard.weights.head import answer_hash
from serve.engine.head import ServableHead, load_classifier, load_head

READER = "#reader"  # the reader by itself: no rule is called so
MAX_SHOWN = 200  # characters of a value that an error quotes


@dataclass(frozen=True)
class ServableAdapter:
    """A checked adapter folder under the name it is served by. `modules` are the last names of its
    layers; empty where its configuration has a pattern for them. `head`, of an encoder's and of an
    aLoRA that answers by one, reads the states that the adapter makes.
    """

    name: str
    folder: Path
    card: Card
    modules: frozenset[str]
    head: ServableHead | None = field(default=None, compare=False)  # the card names its weights

    @property
    def shares_conversation(self) -> bool:
        """Whether its weights act from the suffix on, and the conversation is the base's."""
        return METHODS[self.card.method].shares_conversation

    @property
    def held_as(self) -> Hashable:
        """Equal for what the backend holds once: a reader, whatever rules it judges."""
        if self.card.untrained is None and self.name != READER:
            return self.name
        return frozenset(self.card.files.items())


@dataclass(frozen=True)
class ServableBase:
    """A rule that the bare base judges, under the name it is served by."""

    name: str
    folder: Path
    card: Card


Servable = ServableAdapter | ServableHead | ServableBase


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
        """What an engine of this recipe demands. Raises GuardError if its base is missing."""
        rank = max_rank or recipe.max_rank
        return cls(recipe.base, recipe.base_revision, rank, prompt_builder(recipe), recipe.kind)

    def check_base(self, recipe: Recipe) -> None:
        """Raise GuardError if the base on the disk is not the one that was there before."""
        revision = recipe.base_revision
        if revision != self.base_revision:
            problem, where = "the base was replaced while it was loaded", recipe.base_path
            raise GuardError(problem, where=where, got=revision[:12], remedy="Start again")

    def admit(self, name: str, folder: Path) -> Servable:
        """What `folder` has. Raises GuardError naming the check it fails."""
        _check_links(folder)
        card = load_card(folder)
        self._check_card(card, folder)
        if card.untrained == "base":
            return ServableBase(name, folder, card)
        if not METHODS[card.method].is_adapter:
            return load_head(name, folder, card)
        path = folder / PEFT_CONFIG
        config = self._config(path, card)
        self._check_invocation(config, card, path)
        modules = _modules(config, path, card)
        head = None
        if self.kind == "encoder":
            head = load_classifier(name, folder, card)
        elif HEAD in card.files:
            head = load_head(name, folder, card)
        return ServableAdapter(name, folder, card, modules, head)

    def _check_card(self, card: Card, folder: Path) -> None:
        remedy = card.remedy
        if (card.base, card.base_revision) != (self.base, self.base_revision):
            got = f"{card.base} {card.base_revision[:12]}"
            raise GuardError("trained on another base", where=folder, got=got, remedy=remedy)
        if card.rule_hash != text_hash(card.rule_text):
            problem = "the card's rule text is not the one its hash names"
            raise GuardError(problem, where=folder, got=card.rule_hash[:12], remedy=remedy)
        if card.composed_of and COMPOSITION not in card.metrics:
            problem = "a composed rule without its report of interference is not served"
            raise GuardError(problem, where=folder, got=card.rule, remedy=remedy)
        check_code(card, self.prompts, folder, remedy)

    def _config(self, path: Path, card: Card) -> dict[str, Any]:
        config = load_json(path, remedy=card.remedy)
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise GuardError("not a LoRA adapter", where=path, remedy=card.remedy)
        _check_honoured(config, path)
        rank = config.get("r")
        if not isinstance(rank, int) or not 1 <= rank <= self.max_rank:
            problem = f"the rank must be between 1 and {self.max_rank}"
            remedy = "Raise max_lora_rank in the recipe's engine section, or train with a lower one"
            raise GuardError(problem, where=path, got=rank, remedy=remedy)
        return config

    def _check_invocation(self, config: dict[str, Any], card: Card, path: Path) -> None:
        """Raise GuardError for another invocation: PEFT and vLLM would not find it, and answer with
        the base as if that were a verdict.
        """
        configured = config.get("alora_invocation_tokens") or ()
        invocation = tuple(configured) if isinstance(configured, list) else configured
        expected: tuple[int, ...] = ()
        if METHODS[card.method].shares_conversation:
            expected = self.prompts.invocation(card.rule_text)
        if invocation != expected:
            problem = f"an adapter of method '{card.method}' must have the invocation tokens"
            problem += f" {list(expected)}"
            got = str(configured)[:MAX_SHOWN]
            raise GuardError(problem, where=path, got=got, remedy=card.remedy)


def _check_honoured(config: dict[str, Any], path: Path) -> None:
    """Raise GuardError for a field of PEFT's that the engine would ignore."""
    from vllm_alora.peft_config import unserved  # imports no vLLM; `make doctor` says if it is gone

    name = unserved(config)
    if name is not None:
        problem = f"PEFT acts on the adapter's {name}, and the engine does not"
        remedy = "Take it out of the recipe's lora section and train again"
        got = f"{name}: {config[name]!r}"[:MAX_SHOWN]
        raise GuardError(problem, where=path, got=got, remedy=remedy)


def check_code(card: Card, prompts: PromptBuilder, folder: Path, remedy: str) -> None:
    """Raise GuardError where a text or a logit is not made as when the weights were trained."""
    if card.prompt_hash != prompts.hash:
        problem = "trained on another wording or layout of the prompt"
        raise GuardError(problem, where=folder, got=card.prompt_hash[:12], remedy=remedy)
    if card.answer_hash != answer_hash():
        problem = "trained for another way to compute a verdict"
        raise GuardError(problem, where=folder, got=card.answer_hash[:12], remedy=remedy)


def trained(
    runs: Runs,
    model: str,
    method: str,
    selection: str | None = None,
    champions: Mapping[str, Path] = MappingProxyType({}),
    withheld: Collection[str] = (),
) -> dict[str, Path]:
    """The folders of a method that serve (seed 0), by rule: all, or those of a comma-separated
    `selection`; of a rule with a champion, that; of one that is `withheld` no other. Raises
    GuardError if there is none, one of the selection is not trained, or one is a link to a folder
    that is not among the runs.
    """
    root = runs.root / model
    cards = sorted(root.glob(f"*/{method}/{CARD}"))
    names = [card.parent.parent.name for card in cards]
    folders = {name: root / name / method for name in names if name not in withheld}
    folders |= champions
    train = f"`make train RULE=... MODEL={model} METHOD={method}`"
    if not folders:
        remedy = f"Run {train} first"
        trained_by = sorted({card.parent.name for card in root.glob(f"*/*/{CARD}")} & set(METHODS))
        if trained_by:
            remedy += f", or name a method that has weights: {', '.join(trained_by)}"
        raise GuardError(f"no rule is trained by method '{method}'", where=root, remedy=remedy)
    if selection is not None:
        names = comma_separated(selection, "rule")
        missing = ", ".join(name for name in names if name not in folders)
        if missing:
            problem = f"a rule that is not trained by method '{method}'"
            remedy = f"Trained: {', '.join(folders)}; or run {train}"
            raise GuardError(problem, got=missing, remedy=remedy)
        folders = {name: folders[name] for name in names}
    for rule, folder in folders.items():
        if rule not in champions and not folder.resolve().is_relative_to(root.resolve()):
            remedy = "Put the folder itself there"
            raise GuardError(f"a link that leads out of {root}", where=folder, remedy=remedy)
    return folders


def _check_links(folder: Path) -> None:
    """Raise GuardError for a file that is a link out of its folder: what it leads to would be read,
    and change, without the folder's doing.
    """
    for path in sorted(folder.glob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            remedy = "Put the file itself there"
            raise GuardError("a link that leads out of its folder", where=path, remedy=remedy)


def _modules(config: dict[str, Any], path: Path, card: Card) -> frozenset[str]:
    """The last names of the layers that the configuration lists, if it does; PEFT lists the whole
    ones of a base with few layers.
    """
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return frozenset()
    if not all(isinstance(name, str) for name in targets):
        raise GuardError("target_modules must be names", where=path, remedy=card.remedy)
    return frozenset(name.rpartition(".")[2] for name in targets)
