"""Rules without weights: which of them are served, and their version 0 in the registry. The
recipe's reader judges all of them, without one the bare base those that are named. Knows nothing of
engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from guard.arguments import comma_separated
from guard.errors import GuardError
from guard.home import own_or_shipped, yaml_files
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from guard.rule import RULES, load_rule
from guard.weights.card import CARD, ZERO, Card, load_card, read_card
from guard.weights.version_zero import card_of_base, card_of_reader
from serve.registry.registry import RegisteredRule, Registry, user_name

log = logging.getLogger(__name__)

State = tuple[str | tuple[Path, int], ...]  # a rule, and the times of change of its files
NOTE = "judged without weights of its own"


class UntrainedRules:
    """The rules that one base can judge without weights, beside those of a method. Raises
    GuardError for a reader that is not there or damaged.
    """

    def __init__(self, recipe: Recipe, method: str, registry: Registry) -> None:
        self._recipe, self._method, self._registry = recipe, method, registry
        self._reader = reader_of(recipe, method)
        self._cards: dict[State, Card] = {}  # by what they are made of
        self._followed: dict[str, Card] = {}  # of the last look at a rule
        self._refused: dict[str, State] = {}  # of which the log has told

    @property
    def has_reader(self) -> bool:
        return self._reader is not None

    def folders(self, rules: str | None, taken: Iterable[str]) -> dict[str, Path]:
        """The folders of version 0 of the rules of a comma-separated list, by default of all, but
        for those that are `taken`. Raises GuardError for one that is named and cannot be judged.
        """
        names = list(rule_files())
        if rules is not None:
            names = [name for name in comma_separated(rules, "rule") if name in names]
        folders: dict[str, Path] = {}
        for name in names if self._may_judge(is_named=rules is not None) else ():
            if name in taken:
                continue
            try:
                folders[name] = self.folder(name)
            except GuardError as error:
                if rules is not None:
                    raise
                log.warning("the rule %s is left out: %s", name, error)
        return folders

    def _may_judge(self, *, is_named: bool) -> bool:
        """Whether the reader judges beside this method, or else the bare base what is named."""
        is_bare = self._recipe.reader is None and not self._recipe.is_encoder
        return self._reader is not None or (is_named and is_bare)

    def folder(self, rule: str) -> Path:
        """Where the rule's version 0 is; it is registered if it is none yet. Raises GuardError for
        a rule that cannot be read, and where the registry cannot be written.
        """
        card = self.card(rule)
        rollout = self._registry.rollout(RegisteredRule.of(card))
        folder = self._registry.folder(card.version)
        if rollout is not None and rollout.folder == folder:
            return folder
        named = {"actor": user_name(), "note": NOTE}
        return self._registry.register_zero(card, self._reader, **named).folder

    def follow(self, served: Card) -> None:
        """Register the version 0 of a served rule anew if its file or the reader has changed since
        the last look: another process may have other files. Of a mistake the log says once.
        """
        rule, before = served.rule, self._followed.get(served.rule, served)
        try:
            card = self.card(rule)
            if before.untrained and before.version != card.version:
                self.folder(rule)
            self._followed[rule] = card
        except GuardError as error:
            refused, self._refused[rule] = self._refused.get(rule), self._state(rule)
            if refused != self._refused[rule]:
                log.error("the rule %s is served as before: %s", rule, error)

    def zero(self, rule: str) -> str | None:
        """The rule's version 0, registered by now; None where no reader judges it."""
        return None if self._reader is None else read_card(self.folder(rule)).version

    def card(self, rule: str) -> Card:
        """The card of the rule's version 0 by the words of now. Raises GuardError for a rule that
        cannot be read.
        """
        state = self._state(rule)
        if state not in self._cards:
            self._cards[state] = self._made_card(rule)
        return self._cards[state]

    def _state(self, rule: str) -> State:
        """What the rule's card is made of, and when it changed; looked at twice a second."""
        files = [own_or_shipped(RULES / f"{rule}.yaml")]
        if self._reader is not None:
            files.append(self._reader / CARD)
        return rule, *[(file, file.stat().st_mtime_ns) for file in files if file.is_file()]

    def _made_card(self, rule: str) -> Card:
        read = load_rule(rule, RULES)
        if self._reader is not None:
            return card_of_reader(read_card(self._reader), rule, read.text("reader"))
        prompts = prompt_builder(self._recipe)
        return card_of_base(self._recipe, prompts, self._method, rule, read.text())


def reader_of(recipe: Recipe, method: str) -> Path | None:
    """The folder of the base's reader, where it judges beside weights of this method. Raises
    GuardError for a reader that is not there or damaged.
    """
    folder = recipe.reader_folder
    if folder is None or load_card(folder).method != method:
        return None
    return folder


def is_zero(folder: Path) -> bool:
    """Whether it is the registry's folder of a version 0."""
    return folder.name.startswith(ZERO)


def rule_files() -> dict[str, Path]:
    """The files of all rules, by name."""
    return {path.stem: path for path in yaml_files(RULES)}
