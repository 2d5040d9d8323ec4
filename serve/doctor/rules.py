"""What can be served: recipes, rules, and the weights that were trained for them. Knows nothing of
what the weights answer; their own checks say whether they are in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from guard.errors import GuardError
from guard.home import yaml_files
from guard.layout import Runs
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import MODELS, load_recipe
from guard.rule import RULES, load_rule
from guard.weights.card import check_rule, load_card
from serve.doctor.finding import Finding
from serve.engine.adapter import Requirements


def recipes() -> Iterator[Finding]:
    """Whether every model and rule file loads, and whether a local base is whole."""
    for path in yaml_files(MODELS):
        try:
            yield _recipe(path.stem)
        except GuardError as error:
            yield Finding("recipes", str(error), "Correct the file")
    for path in yaml_files(RULES):
        try:
            yield Finding("rules", f"{path.stem}: {load_rule(path.stem, RULES).title}")
        except GuardError as error:
            yield Finding("rules", str(error), "Correct the file")


def _recipe(name: str) -> Finding:
    """The finding on one recipe: whether a local base has weights and a tokenizer."""
    recipe = load_recipe(name, MODELS)
    text = f"{name}: {recipe.base}, {recipe.context_tokens:,} tokens of context"
    folder = Path(recipe.source)
    if folder.is_file() or recipe.layers is not None:
        return Finding("recipes", f"{text}, made of {recipe.source} when it is first used")
    if not folder.is_dir():
        return Finding("recipes", f"{text}, of the hub")
    prompt_builder(recipe)
    if any(folder.glob("*.safetensors")):
        return Finding("recipes", text)
    remedy = "Save them there in safetensors; `git checkout` restores a base of the checkout"
    return Finding("recipes", f"{text}, but no weights", remedy)


def weights() -> Iterator[Finding]:
    """Whether all trained weights, by any method, may be served and match the rule of today."""
    root = Runs().root
    folders: list[Path] = []
    unfinished: list[Path] = []
    for method in METHODS:
        for name in (method, f"{method}-seed*"):  # as guard.layout names them
            folders += [path for path in root.glob(f"*/*/{name}") if path.is_dir()]
            unfinished += root.glob(f"*/*/.{name}.part")
    for part in sorted(unfinished):
        command = _train_command(part.with_name(part.name.removeprefix(".").removesuffix(".part")))
        yield Finding("weights", f"{part.relative_to(root)}: unfinished; `{command}` resumes it")
    requirements = functools.cache(lambda model: Requirements.of(load_recipe(model)))
    for folder in sorted(folders):
        yield _weights(folder, str(folder.relative_to(root)), requirements)
    if not folders:
        yield Finding("weights", "none yet; `make all RULE=medical_advice` trains the first")


def _weights(folder: Path, name: str, requirements: Callable[[str], Requirements]) -> Finding:
    """The finding on one folder of weights. Only a folder that is broken itself needs another
    training: what is wrong elsewhere, such as a base that cannot be reached, leaves weights valid.
    """
    try:
        card = load_card(folder)
    except GuardError as error:
        command = f"{_train_command(folder)} FORCE=1"
        return _problem(error, f"{error.remedy}. What trains it again: `{command}`")
    try:
        return _trained(folder, name, requirements(card.model))
    except GuardError as error:
        return _problem(error, error.remedy)


def _problem(error: GuardError, remedy: str | None) -> Finding:
    """The error's line without its own remedy, and this one."""
    line = GuardError(error.problem, where=error.where, got=error.got)
    return Finding("weights", str(line), remedy or "Correct it")


def _train_command(folder: Path) -> str:
    """The command that trains the weights of a folder, which lies as `guard.layout` says."""
    method, _, seed = folder.name.partition("-seed")
    rule, model = folder.parent.name, folder.parent.parent.name
    command = f"make train RULE={rule} MODEL={model} METHOD={method}"
    if seed:
        command += f" SEEDS={seed}"
    return command


def _trained(folder: Path, name: str, requirements: Requirements) -> Finding:
    """The finding on weights with a card. Raises GuardError if they may not be served."""
    card = requirements.admit(name, folder).card
    check_rule(card, folder.parent.name, folder)
    rule, recipe = load_rule(card.rule, RULES), load_recipe(card.model)
    state = "ready"
    text = rule.text(recipe.rule_turn_of(card.method))
    if (text, recipe.reads(rule)) != (card.rule_text, card.reads):
        state = f"ready for its rule as it was; `{card.retrain}` follows the change"
    return Finding("weights", f"{name}: {state}; version {card.version}")
