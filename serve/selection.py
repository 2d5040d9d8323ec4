"""What a command serves: of which bases, which rules, by which method. Starts what answers them.

Knows nothing of HTTP and of vLLM.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from guard.arguments import comma_separated
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from guard.method import METHODS, method_named
from guard.recipe import Recipe, load_recipe
from guard.weights.card import CARD, Card, check_rule, read_card
from serve.engine import GuardEngine
from serve.engine.adapter import Requirements, trained
from serve.engine.engines import GuardEngines, model_of
from serve.merge import MERGED, mergeable_method, merged_engine
from serve.registry.change import PreparedChange, RolloutChange, prepared
from serve.registry.history import RuleHistory, history
from serve.registry.registry import RegisteredRule, Registry, publishing, user_name
from serve.registry.rollout import Rollout, TrialVersion
from serve.registry.source import RolloutSource
from serve.untrained import UntrainedRules, is_zero, reader_of, rule_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """What the command line names: models and rules separated by commas; by default all rules."""

    models: str = "tiny"
    rules: str | None = None
    method: str | None = None
    is_merged: bool = False
    runs: Runs = field(default_factory=Runs)


@dataclass(frozen=True)
class ServedPart:
    """What one base serves: the folders of its rules, by name, all by one method."""

    recipe: Recipe
    method: str
    folders: Mapping[str, Path]

    @property
    def reader(self) -> Path | None:
        """The folder of the reader, where it judges beside this method."""
        return reader_of(self.recipe, self.method)


def served_parts(selection: Selection) -> list[ServedPart]:
    """What each of the named bases serves; the first one that has a rule answers it.

    Raises GuardError if a base has nothing to serve, or a rule is trained on none.
    """
    models = comma_separated(selection.models, "model")
    if len(models) == 1:
        return [_checked(selection, _part(load_recipe(models[0]), selection, selection.rules))]
    if selection.is_merged:
        raise GuardError(
            "a merged base answers alone", got=selection.models, remedy="Name one MODEL"
        )
    named_rules = None if selection.rules is None else comma_separated(selection.rules, "rule")
    parts: list[ServedPart] = []
    served: set[str] = set()
    for model in models:
        part = _part(load_recipe(model), selection, None)
        folders: dict[str, Path] = {}
        for name, folder in part.folders.items():
            is_named = named_rules is None or name in named_rules
            if is_named and name not in served:
                folders[name] = folder
        served |= set(folders)
        if folders:
            parts.append(_checked(selection, replace(part, folders=folders)))
    missing = sorted(set(named_rules or ()) - served)
    if missing:
        remedy = "Run `make train` for it"
        raise GuardError("not trained", got=", ".join(missing), remedy=remedy)
    return parts


def left_out(selection: Selection, parts: Sequence[ServedPart]) -> str | None:
    """A line that names the rules of the named bases which no part serves, since they have no
    weights of the served method; None if there are none, or not all rules are meant.
    """
    if selection.rules is not None or selection.is_merged:
        return None
    served = {name for part in parts for name in part.folders}
    weights: dict[str, list[str]] = {}
    for model in comma_separated(selection.models, "model"):
        for card in sorted((selection.runs.root / model).glob(f"*/*/{CARD}")):
            rule, method = card.parent.parent.name, card.parent.name
            if rule not in served and method in METHODS:
                weights.setdefault(rule, []).append(f"{method} on {model}")
    if not weights:
        return None
    described = [f"{rule} ({', '.join(methods)})" for rule, methods in sorted(weights.items())]
    return f"left out, as they have no weights of the served method: {', '.join(described)}"


def registered(selection: Selection, parts: Sequence[ServedPart]) -> list[ServedPart]:
    """The parts, of which weights that are no version yet have become one: what is trained while
    they are served changes no file that is read again. As they are where nothing can be written.
    """
    registry = Registry(selection.runs)
    kept: list[ServedPart] = []
    for part in parts:
        folders = dict(part.folders)
        for rule, folder in () if selection.is_merged else part.folders.items():
            if not folder.is_relative_to(registry.root):
                with contextlib.suppress(GuardError):
                    note = "found when it was served"
                    folders[rule] = registry.register(folder, actor=user_name(), note=note).folder
        kept.append(replace(part, folders=folders))
    return kept


def unpublished(selection: Selection, parts: Sequence[ServedPart]) -> list[str]:
    """A line for each rule that has a candidate, or other weights copied to its folder."""
    lines: list[str] = []
    registry = Registry(selection.runs)
    for part in parts:
        for rule in () if selection.is_merged else part.folders:
            name = RegisteredRule(part.recipe.name, rule, part.method)
            version = registry.aliases(name).get("candidate")
            with contextlib.suppress(GuardError):  # nothing lies there, or nothing is registered
                copied = read_card(selection.runs.adapter(*name)).version
                if copied not in [known.id for known in registry.versions(name)]:
                    version = copied
            if version:
                lines.append(f"{rule}: {version[:12]} is not served: {publishing(name)}")
    return lines


def _part(recipe: Recipe, selection: Selection, rules: str | None) -> ServedPart:
    method = _method(recipe, selection)
    folders = _served(selection, recipe, method, rules)
    if selection.is_merged and rules is None and len(folders) > 1:
        problem, remedy = "one rule is merged", "Name it: RULE=, and behind it those beside it"
        raise GuardError(problem, got=", ".join(folders), remedy=remedy)
    if selection.is_merged:
        champions = _trained_champions(Registry(selection.runs), recipe.name, method)
        folders |= {rule: champions.get(rule, folders[rule]) for rule in list(folders)[1:]}
    return ServedPart(recipe, method, folders)


def _method(recipe: Recipe, selection: Selection) -> str:
    if selection.is_merged:
        return mergeable_method(recipe)
    return served_method(recipe, selection.method)


def _served(
    selection: Selection, recipe: Recipe, method: str, rules: str | None
) -> dict[str, Path]:
    """`trained`, with the registry's champions, and version 0 of what has no weights, or is
    preferred to them. What is merged lies beside the rule's folder.
    """
    champions: dict[str, Path] = {}
    withheld: set[str] = set()
    if not selection.is_merged:
        registry = Registry(selection.runs)
        champions = _trained_champions(registry, recipe.name, method)
        withheld = registry.champions(recipe.name, method).keys() - champions.keys()
        with_weights = _with_weights(selection, registry)
        champions |= UntrainedRules(recipe, method, registry).folders(rules, with_weights)
        for rule in withheld - champions.keys() - with_weights if rules is None else ():
            how = publishing(RegisteredRule(recipe.name, rule, method))
            log.warning("%s: its champion, a version 0, cannot judge here: %s", rule, how)
    return trained(selection.runs, recipe.name, method, rules, champions, withheld)


def _trained_champions(registry: Registry, model: str, method: str) -> dict[str, Path]:
    champions = registry.champions(model, method)
    return {rule: folder for rule, folder in champions.items() if not is_zero(folder)}


def _with_weights(selection: Selection, registry: Registry) -> set[str]:
    """The rules that weights of the served methods answer on any named base. What is no champion
    beside a version 0 does not.
    """
    names: set[str] = set()
    for model in comma_separated(selection.models, "model"):
        method = _method(load_recipe(model), selection)
        cards = (selection.runs.root / model).glob(f"*/{method}/{CARD}")
        weights = {card.parent.parent.name for card in cards}
        names |= weights - registry.champions(model, method).keys()
        names |= _trained_champions(registry, model, method).keys()
    return names


def _checked(selection: Selection, part: ServedPart) -> ServedPart:
    """Raises GuardError for another rule's folder, and for a composed rule with a stale parent."""
    model, method = part.recipe.name, part.method
    champions = Registry(selection.runs).champions(model, method)
    for rule, folder in part.folders.items():
        card = read_card(folder)
        check_rule(card, rule, folder)
        for parent, version in (card.composed_of or {}).items():
            served = champions.get(parent, selection.runs.adapter(model, parent, method))
            current = read_card(served).version if (served / CARD).is_file() else version
            if current != version:
                problem = f"composed of another version of {parent} than is served"
                got = f"{version[:12]}, served is {current[:12]}"
                remedy = f"`{card.retrain}`, and publish it"
                raise GuardError(problem, where=folder, got=got, remedy=remedy)
    return part


def served_method(recipe: Recipe, name: str | None) -> str:
    """The method of this name; without one the recipe's first adapter that shares conversations,
    else its first method. Raises GuardError for a method that the recipe does not list.
    """
    if name is not None:
        recipe.settings(method_named(name).name)
        return name
    if recipe.sharing_methods:
        return recipe.sharing_methods[0]
    return next(iter(recipe.methods))


class RegisteredRollouts(RolloutSource):
    """What of each rule is to be served, as the registry says now: of one that is served its
    champion, of any other one those of the first base that has some. None, and the log says why,
    where there is none; of a rule that is served without versions, None alone.
    """

    def __init__(self, selection: Selection, parts: Sequence[ServedPart]) -> None:
        self._selection = selection
        self._parts = parts
        self._registry = Registry(selection.runs)
        self._untrained: dict[str, UntrainedRules] = {}  # by model
        for part in () if selection.is_merged else parts:
            judged = UntrainedRules(part.recipe, part.method, self._registry)
            self._untrained[part.recipe.name] = judged

    def find(self, rule: str, served: Card | None = None) -> Rollout | None:
        if self._selection.is_merged:
            if served is None:
                log.warning("no weights of the rule %r: a merged base has what it began with", rule)
            return None
        if served is not None:
            rollout = self._registry.rollout(RegisteredRule.of(served))
            if rollout is not None and is_zero(rollout.folder) and served.model in self._untrained:
                self._untrained[served.model].follow(served)
            return self._registry.rollout(RegisteredRule.of(served))
        problems: list[str] = []
        for part in self._parts:
            recipe, method = part.recipe, part.method
            try:
                folders = _served(self._selection, recipe, method, rule)
                _checked(self._selection, ServedPart(recipe, method, folders))
            except GuardError as error:  # of another base it may be trained
                problems.append(str(error))
                continue
            if rule in folders:
                found = self._registry.rollout(RegisteredRule(recipe.name, rule, method))
                return found or Rollout(folder=folders[rule])
        why = "; ".join(problems) or "no rule has this name"
        log.warning("no weights of the rule %r: %s", rule, why)
        return None

    def unserved(self, served: Collection[str]) -> dict[str, int]:
        readers = [judged.has_reader for judged in self._untrained.values()]
        if self._selection.rules is not None or not any(readers):
            return {}
        files = rule_files()
        return {name: files[name].stat().st_mtime_ns for name in files.keys() - set(served)}

    def abort(self, served: Card, trial: TrialVersion, reason: str) -> None:
        rule, gate = RegisteredRule.of(served), "the rule's gate"
        self._registry.abort(rule, trial, actor=gate, reason=reason)

    def history(self, served: Card) -> RuleHistory:
        rule = RegisteredRule.of(served)
        if self._registry.aliases(rule):
            return history(self._registry, rule)
        return RuleHistory()

    def prepare(self, served: Card, change: RolloutChange) -> PreparedChange:
        if self._selection.is_merged:
            remedy = "Run `make merge` again, and start it anew"
            raise GuardError("a merged base answers its rule as it is", remedy=remedy)
        rule = RegisteredRule.of(served)
        recipes = [part.recipe for part in self._parts if part.recipe.name == rule.model]
        admit, zero = Requirements.of(recipes[0]).admit, self._untrained[rule.model].zero
        return prepared(self._registry, self._selection.runs, rule, change, admit, zero)


def open_engines(parts: Sequence[ServedPart]) -> GuardEngines:
    """The engines that answer the rules of all parts. Raises as `start_engines`."""
    return GuardEngines(functools.partial(start_engines, parts))


def start_warm(
    parts: Sequence[ServedPart],
    folders: Mapping[str, Path] | None = None,
    *,
    is_merged: bool = False,
) -> list[GuardEngine]:
    """`start_engines`, once they have answered every rule. Raises GuardError if one cannot."""
    engines = start_engines(parts, folders, is_merged=is_merged)
    with contextlib.ExitStack() as on_failure:
        for engine in engines:
            on_failure.callback(engine.close)
        for engine in engines:
            warm_up(engine)
        on_failure.pop_all()
    return engines


def start_engines(
    parts: Sequence[ServedPart],
    folders: Mapping[str, Path] | None = None,
    *,
    is_merged: bool = False,
) -> list[GuardEngine]:
    """An engine for each part with rules, or of `folders`, by name, each on the base of its card.

    Raises GuardError if one does not start, or a folder is of another rule or of no part's base.
    """
    if is_merged:
        (main, *_), tail = parts[0].folders, dict(parts[0].folders)
        folder = tail.pop(main).with_name(MERGED)
        return [merged_engine(parts[0].recipe, folder, tail)]
    if folders is not None:
        parts = _with_folders(parts, folders)
    engines: list[GuardEngine] = []
    with contextlib.ExitStack() as on_failure:
        for part in parts:
            if part.folders:
                engines.append(GuardEngine(part.recipe, part.folders, reader=part.reader))
                on_failure.callback(engines[-1].close)
        on_failure.pop_all()
    return engines


def _with_folders(parts: Sequence[ServedPart], folders: Mapping[str, Path]) -> list[ServedPart]:
    """The parts, each with those of the folders that are of its base.

    Raises GuardError for a folder of another rule, or of no part's base.
    """
    recipes = [part.recipe for part in parts]
    bases = {recipe.name: (recipe.base, recipe.base_revision) for recipe in recipes}
    by_recipe: dict[str, dict[str, Path]] = {name: {} for name in bases}
    for rule, folder in folders.items():
        card = read_card(folder)  # which may have been put there since
        check_rule(card, rule, folder)
        by_recipe[model_of(card, folder, bases)][rule] = folder
    return [replace(part, folders=by_recipe[part.recipe.name]) for part in parts]


def warm_up(engine: GuardEngine) -> None:
    """Check every rule once: the first check is slow. Raises GuardError if one cannot answer."""
    refused = engine.check([Message("user", "Hello")]).refused
    if not refused:
        return
    rule, refusal = next(iter(refused.items()))
    raise GuardError(
        f"{len(refused)} rules cannot be judged; {rule}: {refusal.why}",
        got=", ".join(refused),
        remedy=f"Train it again (`{engine.rules[rule].retrain} FORCE=1`), or serve the others with "
        "RULE=",
    )
