"""What is evaluated for one rule: the test examples and the weights that answer them.

Everything that can be wrong with the inputs is found here, before an engine starts or a judge is
paid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from guard.conversation.example import SPLITS, Example, read_examples
from guard.errors import GuardError
from guard.layout import Runs, fingerprint, split_files
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from guard.rule import RULES, Rule, check_labelling, load_rule, text_hash
from guard.weights.card import CARD, Card, load_card
from guard.weights.predictions import PREDICTIONS, read_predictions

SHOWN = 40  # characters of a card's field that an error quotes


@dataclass(frozen=True)
class Contestant:
    """A method's weights under test, of one seed; 0 where the method has none. `reference_logits`
    are what the training stage computed without the engine (plain PEFT for an adapter): log P(yes)
    - log P(no), nats, by test example id.
    """

    rule: str
    method: str
    seed: int
    folder: Path
    card: Card
    reference_logits: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name that the engine has for it, unique in a run."""
        return f"{self.rule}/{self.method}/{self.seed}"


@dataclass(frozen=True)
class Trial:
    """One rule's test: which examples, which weights, on which base."""

    rule: Rule
    recipe: Recipe
    base_revision: str
    examples: tuple[Example, ...]
    contestants: tuple[Contestant, ...]  # by method in the recipe's order, then by seed
    seeds: tuple[int, ...]  # of the methods that have seeds
    left_out: tuple[str, ...]  # seeds nobody asked for that cannot be evaluated, and why
    data: Path  # the folder of the rule's examples
    folder: Path
    inputs: str  # fingerprint of everything above

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.recipe.methods)

    def by_seed(self, method: str) -> dict[int, Contestant]:
        """The weights of one method by seed; seed 0 alone where the method has no seeds."""
        contestants = [weights for weights in self.contestants if weights.method == method]
        return {contestant.seed: contestant for contestant in contestants}


def load_trial(
    runs: Runs,
    recipe: Recipe,
    base_revision: str,
    rule_name: str,
    *,
    seeds: Sequence[int] | None = None,
    rules: Path = RULES,
) -> Trial:
    """The trial of a rule. Without `seeds` it has every seed for which all seeded methods were
    trained and can still be evaluated. Raises GuardError when the data or a method's weights are
    missing, when the weights answer another wording, belong to another base or were trained on
    other data, or when their reference predictions do not cover the test examples.
    """
    recipe = answering_recipe(recipe)
    rule = load_rule(rule_name, rules)
    data = runs.data(rule_name)
    examples = _test_examples(data)
    check_labelling(data, rule)
    data_hash = fingerprint(*split_files(data))
    requirements = TrialRequirements(runs, recipe, rule, base_revision, data_hash, examples)
    contestants, left_out = _contestants(requirements, seeds)
    seeded = [weights for weights in contestants if METHODS[weights.method].is_seeded]
    seeds = tuple(dict.fromkeys(weights.seed for weights in seeded))
    files: list[Path] = []
    for weights in contestants:
        files += [weights.folder / CARD, weights.folder / PREDICTIONS]
    facts = [rule.model_dump(), recipe.model_dump(), base_revision, data_hash, seeds]
    return Trial(
        rule=rule,
        recipe=recipe,
        base_revision=base_revision,
        examples=examples,
        contestants=contestants,
        seeds=seeds or (0,),
        left_out=left_out,
        data=data,
        folder=runs.root / recipe.name / rule_name / "eval",
        inputs=fingerprint(*facts, *files),
    )


def answering_recipe(recipe: Recipe) -> Recipe:
    """The recipe by which one engine answers all methods, heads too, in one dtype."""
    for name, settings in recipe.methods.items():
        if METHODS[name].acts_from == "output" or settings.head is not None:
            return recipe.served_as_trained()
    return recipe


def trained_seeds(runs: Runs, recipe: Recipe, rule: str) -> tuple[int, ...]:
    """The seeds of which every seeded method is finished, or 0. Raises GuardError where none is."""
    folder = runs.root / recipe.name / rule
    command = f"make train RULE={rule} MODEL={recipe.name}"
    finished = {name: _finished_seeds(folder, name) for name in recipe.methods}
    untrained = [name for name, seeds in finished.items() if not seeds]
    if untrained:
        commands = [f"`{command} METHOD={name}`" for name in untrained]
        problem = f"not trained by every method of the recipe: {', '.join(untrained)} missing"
        raise GuardError(problem, where=folder, remedy=f"Run {' and '.join(commands)}")
    seeded = {name: seeds for name, seeds in finished.items() if METHODS[name].is_seeded}
    if not seeded:
        return (0,)
    common = set.intersection(*seeded.values())
    if not common:
        listing = "; ".join(f"{name}: {sorted(seeds)}" for name, seeds in seeded.items())
        problem = "no seed was trained by every method that has seeds"
        raise GuardError(problem, where=folder, got=listing, remedy=f"Run `{command}`")
    return tuple(sorted(common))


def _finished_seeds(folder: Path, method: str) -> set[int]:
    seeds = set()
    for card in folder.glob(f"{method}*/{CARD}"):
        if match := re.fullmatch(rf"{re.escape(method)}(?:-seed(\d+))?", card.parent.name):
            seeds.add(int(match[1] or 0))
    return seeds


def _test_examples(data: Path) -> tuple[Example, ...]:
    """The test examples. Raises GuardError."""
    remedy = f"Run `make data RULE={data.name}`"
    for split in SPLITS:
        if not (data / f"{split}.jsonl").is_file():
            raise GuardError(f"no {split}.jsonl", where=data, remedy=remedy)
    test = data / "test.jsonl"
    examples = tuple(read_examples(test))
    if not examples:
        raise GuardError("no test examples", where=test, remedy=remedy)
    if len({example.id for example in examples}) < len(examples):
        raise GuardError("two test examples have the same id", where=test, remedy=remedy)
    return examples


def _contestants(
    requirements: TrialRequirements, seeds: Sequence[int] | None
) -> tuple[tuple[Contestant, ...], tuple[str, ...]]:
    """Every method's weights, and the seeds left out. Raises GuardError for what was asked for."""
    wanted = seeds or trained_seeds(requirements.runs, requirements.recipe, requirements.rule.id)
    names = list(requirements.recipe.methods)
    seeded = [name for name in names if METHODS[name].is_seeded]
    loaded = [requirements.contestant(name, 0) for name in names if name not in seeded]
    errors: dict[int, GuardError] = {}
    for seed in wanted:
        try:
            loaded += [requirements.contestant(name, seed) for name in seeded]
        except GuardError as error:
            if seeds is not None:
                raise
            errors[seed] = error
    if len(errors) == len(wanted):
        raise next(iter(errors.values()))
    left_out = [f"{requirements.rule.id} seed {seed}: {error}" for seed, error in errors.items()]
    return tuple(sorted(loaded, key=lambda it: names.index(it.method))), tuple(left_out)


@dataclass(frozen=True)
class TrialRequirements:
    """What weights must fit: with another base, wording or split figures are worthless."""

    runs: Runs
    recipe: Recipe
    rule: Rule
    base_revision: str
    data_hash: str
    examples: Sequence[Example]

    @cached_property
    def prompt_hash(self) -> str:
        return prompt_builder(self.recipe).hash

    def contestant(self, method: str, seed: int) -> Contestant:
        """The weights of one method and seed. Raises GuardError where they do not fit."""
        folder = self.runs.adapter(self.recipe.name, self.rule.id, method, seed)
        train = f"make train RULE={self.rule.id} MODEL={self.recipe.name}"
        if seed:
            train += f" SEEDS={seed}"
        remedy = f"Run `{train}`"
        if not (folder / CARD).is_file():
            raise GuardError(f"no {CARD}: not finished weights", where=folder, remedy=remedy)
        card = load_card(folder)
        for field, wanted, got in self._differences(card, method, seed):
            problem = f"the weights' {field} is not the one to be evaluated ({wanted})"
            raise GuardError(problem, where=folder, got=got, remedy=remedy)
        remedy = f"Run `{train} METHOD={method} FORCE=1`"
        logits = read_predictions(folder, "test", remedy)
        for example in self.examples:
            if example.id not in logits:
                problem = f"no reference prediction for test example {example.id}"
                raise GuardError(problem, where=folder / PREDICTIONS, remedy=remedy)
        return Contestant(self.rule.id, method, seed, folder, card, logits)

    def _differences(self, card: Card, method: str, seed: int) -> Iterator[tuple[str, str, str]]:
        expected: dict[str, Any] = {
            "rule_hash": text_hash(self.rule.text(self.recipe.rule_turn_of(method))),
            "prompt_hash": self.prompt_hash,
            "reads": self.recipe.reads(self.rule),
            "base": self.recipe.base,
            "base_revision": self.base_revision,
            "data_hash": self.data_hash,
            "max_fpr": self.rule.max_fpr,
            "max_fpr_twins": self.rule.max_fpr_twins,
            "method": method,
            "seed": seed,
        }
        for field, wanted in expected.items():
            got = getattr(card, field)
            if got != wanted:
                yield field, str(wanted)[:SHOWN], str(got)[:SHOWN]
        settings = self.recipe.training_settings(method)
        for key in settings | card.recipe:
            wanted, got = settings.get(key), card.recipe.get(key)
            if got != wanted:
                yield "recipe", f"{key}: {wanted}", f"{key}: {got}"
