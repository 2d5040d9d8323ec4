"""What is put to the test for one rule: the test examples and the adapters that answer them. Knows nothing of engines or judges.

Everything that can be wrong with the inputs is found here, before an engine starts or a judge is paid.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.words import words_alone
from guard.card import Card, load_card
from guard.errors import GuardError
from guard.example import SPLITS, Example, read_examples
from guard.layout import Runs, fingerprint, split_files
from guard.method import METHODS
from guard.predictions import PREDICTIONS, read_predictions
from guard.recipe import Recipe
from guard.rule import RULES, Rule, load_rule, text_hash

CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Contestant:
    """An adapter under test. `peft_logits` are plain PEFT's log P(yes) - log P(no) by test example id, from the training stage."""

    rule: str
    method: str
    seed: int
    folder: Path
    card: Card
    config_hash: str  # of adapter_config.json: the card names the weights only
    peft_logits: Mapping[str, float]

    @property
    def name(self) -> str:
        """What the engine calls it, unique in a run."""
        return f"{self.rule}/{self.method}/{self.seed}"


@dataclass(frozen=True)
class Trial:
    """One rule's test: which examples, which adapters, on which base. `limit` is None when no test example was left out."""

    rule: Rule
    recipe: Recipe
    base_revision: str
    examples: tuple[Example, ...]
    contestants: tuple[Contestant, ...]
    seeds: tuple[int, ...]
    left_out: tuple[
        str, ...
    ]  # trained seeds that nobody asked for and that cannot be evaluated, and why
    limit: int | None
    words_auroc: Mapping[
        str, float
    ]  # what words alone reach, by stratum; empty where it is not known
    folder: Path
    inputs: str  # fingerprint of everything above

    @property
    def served_seed(self) -> int:
        """0, the adapters that are served, or else the first."""
        return 0 if 0 in self.seeds else self.seeds[0]

    def by_seed(self, method: str) -> dict[int, Contestant]:
        """The adapters of one method by seed."""
        return {
            contestant.seed: contestant
            for contestant in self.contestants
            if contestant.method == method
        }


def load_trial(
    runs: Runs,
    recipe: Recipe,
    base_revision: str,
    rule_name: str,
    *,
    seeds: Sequence[int] | None = None,
    limit: int | None = None,
    rules: Path = RULES,
) -> Trial:
    """The trial of a rule; without `seeds`, of every seed for which both adapters were trained and can be evaluated still.

    Raises GuardError when the data or an adapter is missing, when an adapter answers another wording, stands on another base or was
    trained on other data, or when its PEFT predictions do not cover the test examples.
    """
    rule = load_rule(rule_name, rules)
    test = runs.data(rule_name) / "test.jsonl"
    for split in SPLITS:
        if not (runs.data(rule_name) / f"{split}.jsonl").is_file():
            raise GuardError(
                f"no {split}.jsonl",
                where=runs.data(rule_name),
                remedy=f"Run `make data RULE={rule_name}`",
            )
    everything = read_examples(test)
    examples = _limited(everything, limit)
    limit = len(examples) if len(examples) < len(everything) else None
    if not examples:
        raise GuardError("no test examples", where=test, remedy="Run `make data` for this rule")
    if len({example.id for example in examples}) < len(examples):
        raise GuardError(
            "two test examples have the same id", where=test, remedy="Run `make data` for this rule"
        )
    data_hash = fingerprint(*split_files(runs.data(rule_name)))
    rule_hash = text_hash(rule.text(recipe.rule_turn))
    expected: dict[str, Any] = {
        "rule_hash": rule_hash,
        "base": recipe.base,
        "base_revision": base_revision,
        "data_hash": data_hash,
    }
    expected["max_fpr"] = rule.max_fpr
    pairs: dict[int, list[Contestant]] = {}
    left_out: dict[str, GuardError] = {}
    for seed in trained_seeds(runs, recipe.name, rule_name) if seeds is None else seeds:
        try:
            pairs[seed] = [
                _contestant(
                    runs,
                    recipe,
                    rule,
                    expected | {"method": method, "seed": seed, "recipe": recipe.trains(method)},
                    examples,
                )
                for method in METHODS
            ]
        except GuardError as error:
            if seeds is not None:
                raise
            left_out[f"{rule_name} seed {seed}"] = error
    if not pairs:
        raise next(iter(left_out.values()))
    seeds = tuple(pairs)
    contestants = tuple(
        contestant for method in zip(*pairs.values(), strict=True) for contestant in method
    )
    files = (
        contestant.folder / name
        for contestant in contestants
        for name in ("card.json", CONFIG, PREDICTIONS)
    )
    words_auroc = words_alone(runs.data(rule_name))
    inputs = fingerprint(
        rule.model_dump(),
        recipe.model_dump(),
        base_revision,
        data_hash,
        seeds,
        limit,
        words_auroc,
        *files,
    )
    folder = runs.root / recipe.name / rule_name / "eval"
    why = tuple(f"{name}: {error}" for name, error in left_out.items())
    return Trial(
        rule,
        recipe,
        base_revision,
        examples,
        contestants,
        seeds,
        why,
        limit,
        words_auroc,
        folder,
        inputs,
    )


def trained_seeds(runs: Runs, model: str, rule: str) -> tuple[int, ...]:
    """The seeds for which both adapters are finished. Raises GuardError if there is none."""
    folder = runs.root / model / rule
    suffixes = [path.parent.name.partition("-seed")[2] for path in folder.glob("alora*/card.json")]
    candidates = sorted(int(suffix or 0) for suffix in suffixes if not suffix or suffix.isdigit())
    seeds = tuple(
        seed
        for seed in candidates
        if all(
            (runs.adapter(model, rule, method, seed) / "card.json").is_file() for method in METHODS
        )
    )
    if not seeds:
        raise GuardError(
            "no seed has both a LoRA and an aLoRA",
            where=folder,
            remedy=f"Run `make train RULE={rule} MODEL={model}`",
        )
    return seeds


def _limited(examples: list[Example], limit: int | None) -> tuple[Example, ...]:
    """At most `limit` examples, drawn evenly with a fixed seed (files may be sorted by label), in the file's order."""
    if limit is None or limit >= len(examples):
        return tuple(examples)
    return tuple(
        examples[index] for index in sorted(random.Random(0).sample(range(len(examples)), limit))
    )


def _contestant(
    runs: Runs, recipe: Recipe, rule: Rule, expected: Mapping[str, Any], examples: Sequence[Example]
) -> Contestant:
    """The adapter whose card says what is `expected`: another base, wording or split of the data would make its figures worthless."""
    method, seed = expected["method"], expected["seed"]
    folder = runs.adapter(recipe.name, rule.id, method, seed)
    card = load_card(folder)
    again = f"Run `make train RULE={rule.id} MODEL={recipe.name}{f' SEEDS={seed}' if seed else ''}`"
    for field, value in expected.items():
        if (found := getattr(card, field)) != value:
            wanted, got = (
                (_short(value), _short(found)) if field != "recipe" else _unlike(value, found)
            )
            raise GuardError(
                f"the adapter's {field} is not the one to be evaluated ({wanted})",
                where=folder,
                got=got,
                remedy=again,
            )
    logits = read_predictions(folder, "test", again)
    for example in examples:
        if example.id not in logits:
            raise GuardError(
                f"no PEFT prediction for test example {example.id}",
                where=folder / PREDICTIONS,
                remedy=again,
            )
    if not (folder / CONFIG).is_file():
        raise GuardError(f"no {CONFIG}", where=folder, remedy=again)
    return Contestant(rule.id, method, seed, folder, card, fingerprint(folder / CONFIG), logits)


def _short(value: Any) -> str:
    return str(value)[:12]


def _unlike(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, str]:
    """What two recipes do not have in common."""
    one, other = dict(_settings(wanted)), dict(_settings(found))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    said = [", ".join(f"{key}: {settings.get(key)}" for key in keys) for settings in (one, other)]
    return said[0], said[1]


def _settings(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
