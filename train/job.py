"""The weights to train for a rule: from which base, method and seed, and where they lie. Knows
nothing of tensors.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock

from guard.files.atomic import atomic_write, locked
from guard.layout import Runs, fingerprint, not_current, split_files
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import MethodSettings, Recipe
from guard.rule import Reads, Rule
from guard.weights.card import Card, load_card
from guard.weights.head import answer_hash
from serve.registry.registry import Registry

LOCK = "lock"
# Folders whose weights this process trains, and what holds their locks.
_claimed: dict[Path, AcquireReturnProxy[FileLock]] = {}


@dataclass(frozen=True)
class Job:
    """A rule's weights on one base, by one method and seed. A study's are measured, not served."""

    rule: Rule
    recipe: Recipe
    method: str
    seed: int
    builder: PromptBuilder
    runs: Runs
    of_study: bool = False

    @property
    def name(self) -> str:
        name = f"{self.rule.id} {self.method} seed {self.seed}"
        if self.runs.label:
            name += f", {self.runs.label}"
        return name

    def where(self, section: str) -> str:
        """The place of a section of the method's settings in the recipe, for errors."""
        return f"recipe {self.recipe.name}: methods.{self.method}.{section}"

    @property
    def data(self) -> Path:
        return self.runs.data(self.rule.id)

    @property
    def folder(self) -> Path:
        return self.runs.adapter(self.recipe.name, self.rule.id, self.method, self.seed)

    @property
    def scratch(self) -> Path:
        """Folder of checkpoints and of unfinished weights; gone when the job is finished."""
        return self.folder.with_name(f".{self.folder.name}.part")

    @property
    def is_composed(self) -> bool:
        return bool(self.rule.compose) and METHODS[self.method].is_adapter

    @cached_property
    def parents(self) -> dict[Path, Card]:
        """The weights that a composed rule's are made of, of seed 0 those that are served. Raises
        GuardError where a rule has none.
        """
        if not self.is_composed:
            return {}
        model, champions = self.recipe.name, {}
        if not self.seed:
            champions = Registry(self.runs).champions(model, self.method)
        parents: dict[Path, Card] = {}
        for rule in self.rule.compose:
            folder = self.runs.adapter(model, rule, self.method, self.seed)
            folder = champions.get(rule, folder)
            parents[folder] = load_card(folder)
        return parents

    @property
    def composed_of(self) -> dict[str, str] | None:
        return {card.rule: card.version for card in self.parents.values()} or None

    @property
    def rule_text(self) -> str:
        return self.rule.text(self.recipe.rule_turn_of(self.method))

    @property
    def reads(self) -> Reads:
        return self.recipe.reads(self.rule)

    @property
    def settings(self) -> MethodSettings:
        return self.recipe.settings(self.method)

    @property
    def trainer(self) -> dict[str, Any]:
        return self.recipe.trainer_settings(self.method)

    @property
    def patience(self) -> int | None:
        """Epochs, on an encoder evaluations, without a lower validation loss after which training
        ends; None: never.
        """
        return self.settings.early_stopping_patience

    @property
    def min_steps(self) -> int:
        return self.settings.min_steps or 0

    @cached_property
    def data_hash(self) -> str:
        return fingerprint(*split_files(self.data))

    @cached_property
    def test_sha256(self) -> str:
        return hashlib.sha256((self.data / "test.jsonl").read_bytes()).hexdigest()

    @cached_property
    def base_revision(self) -> str:
        return self.recipe.base_revision

    @cached_property
    def inputs(self) -> str:
        """Fingerprint of what decides the weights, read once: a later change makes them stale. Our
        code counts by two hashes of what it makes of fixed inputs, the packages' versions not at
        all: a reworded message does not make a fleet stale. Nor do the rule's rates: another
        threshold is chosen from the predictions that are kept (`train/calibrate.py`).
        """
        return fingerprint(
            self.data_hash,
            [self.builder.hash, answer_hash(), self.rule_text, self.reads],
            [self.recipe.base, self.base_revision],
            [self.recipe.training_settings(self.method), self.patience, self.method, self.seed],
            *filter(None, [self.composed_of]),
        )

    def read_inputs(self) -> None:
        """Take the fingerprints before the rows are read: a change while the job waits for its turn
        makes its weights outdated.
        """
        _ = self.inputs, self.test_sha256

    def claim(self) -> None:
        """Keep other commands off these weights until the scratch folder is closed or this process
        ends. Raises GuardError if another command is training them.
        """
        if self.folder not in _claimed:
            problem = f"{self.name}: another command is training this"
            _claimed[self.folder] = locked(self.scratch / LOCK, problem)

    def forget(self) -> None:
        """Make the job outdated and drop the checkpoints. The weights themselves stay until new
        ones take their place.
        """
        not_current(self.folder)
        self._clear_scratch()

    def open_scratch(self) -> None:
        """Keep what an interrupted run of the same inputs left; drop what any other run left."""
        stamp = self.scratch / "inputs.json"
        if not stamp.is_file() or stamp.read_text() != self.inputs:
            self._clear_scratch()
            self.scratch.mkdir(parents=True, exist_ok=True)
            with atomic_write(stamp) as part:
                part.write_text(self.inputs)

    def close_scratch(self) -> None:
        """Delete the scratch folder, and let other commands train these weights again."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        lock = _claimed.pop(self.folder, None)
        if lock:
            lock.lock.release()

    def _clear_scratch(self) -> None:
        for path in self.scratch.glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
