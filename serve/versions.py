"""The registry from the command line: `make rules`, `publish`, `rollback` and `mode`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from guard.arguments import comma_separated
from guard.errors import GuardError, choose_from, exits_cleanly
from guard.layout import Runs
from guard.method import METHODS
from guard.recipe import load_recipe
from guard.rule import load_rule
from guard.weights.card import CARD, check_rule, read_card
from serve.engine.adapter import Requirements
from serve.registry.registry import Alias, RegisteredRule, Registry, Version, user_name
from serve.registry.rollout import ENFORCE, SHOWN_DIGITS, Mode, Rollout
from serve.selection import served_method

COMMANDS = "list|publish|rollback|mode"


def listing(registry: Registry, rules: list[str] | None = None) -> str:
    """Every version of the rules, newest first, with its aliases. Raises GuardError for rules
    without versions.
    """
    lines = [f"{'version':<{SHOWN_DIGITS}}  {'alias':<9}  threshold  AUROC  mode, note, folder"]
    found = [rule for rule in registry.rules() if rules is None or rule.rule in rules]
    missing = set(rules or ()) - {rule.rule for rule in found}
    if missing or not found:
        remedy = "Run `make train`"
        if missing:
            remedy += f". {choose_from(min(missing), [rule.rule for rule in registry.rules()])}"
        got = ", ".join(sorted(missing)) or None
        raise GuardError("no versions", where=registry.file, got=got, remedy=remedy)
    for rule in found:
        aliases: defaultdict[str, list[str]] = defaultdict(list)
        for alias, version_id in registry.aliases(rule).items():
            aliases[version_id].append(alias)
        lines.append(f"\n{rule.rule}, {METHODS[rule.method].label} on {rule.model}")
        rollout = registry.rollout(rule)
        for version in reversed(registry.versions(rule)):
            lines.append(_line(version, ", ".join(aliases[version.id]), _mode(version, rollout)))
        if rules is not None:
            lines += _events(registry, rule)
    return "\n".join(lines)


def _events(registry: Registry, rule: RegisteredRule) -> Iterator[str]:
    """What happened to the rule, the first first."""
    ids = {version.id for version in registry.versions(rule)}
    for event in registry.events():
        if event.version in ids:
            what = f"{event.kind} {event.mode}".strip()
            version = event.version[:SHOWN_DIGITS]
            yield f"{event.at}  {event.actor}: {what} {version}, {event.reason}"


def _mode(version: Version, rollout: Rollout | None) -> str:
    """Empty for what is as it is without a word: a champion that is enforced, another one off."""
    if rollout is not None and rollout.trial is not None and version.id == rollout.trial.version:
        return f"{rollout.trial.mode}, "
    if rollout is not None and version.folder == rollout.folder and rollout.mode != ENFORCE:
        return f"{rollout.mode}, "
    return ""


def _line(version: Version, alias: str, mode: str) -> str:
    named = f"{version.id[:SHOWN_DIGITS]}  {alias:<9}"
    where = f"{mode}{version.note}, {version.folder}"
    try:
        card = read_card(version.folder)
    except GuardError as error:
        return f"{named}  {error.problem}  {where}"
    auroc = card.metrics.get("validation", {}).get("auroc", float("nan"))
    return f"{named}  {card.threshold:9.3f}  {auroc:5.3f}  {where}"


def named_rules(
    registry: Registry, names: str, model: str, method: str, alias: Alias
) -> list[RegisteredRule]:
    """The rules of a comma-separated list; of `all`, those that have a version of this alias.
    Raises GuardError if there is none.
    """
    if names != "all":
        return [RegisteredRule(model, name, method) for name in comma_separated(names, "rule")]
    of_model = [rule for rule in registry.rules() if (rule.model, rule.method) == (model, method)]
    found = [rule for rule in of_model if alias in registry.aliases(rule)]
    if not found:
        remedy = "`make rules` lists all versions"
        raise GuardError(f"no rule has a {alias}", got=f"{method} on {model}", remedy=remedy)
    return found


def candidate(registry: Registry, runs: Runs, rule: RegisteredRule) -> Version:
    """What is to be published: what lies in the rule's folder, if that is no version yet, say
    because it was trained elsewhere, or else the candidate. Raises GuardError if there is none.
    """
    folder = runs.adapter(*rule)
    aliases = registry.aliases(rule)
    wanted = aliases.get("candidate")
    if (folder / CARD).is_file():
        card = read_card(folder)
        check_rule(card, rule.rule, folder)
        if RegisteredRule.of(card) != rule:
            problem, remedy = "weights of another base or method", "Put them into their own folder"
            got = RegisteredRule.of(card)
            raise GuardError(problem, where=folder, got=got, remedy=remedy)
        known = {version.id for version in registry.versions(rule)} if aliases else set()
        if card.version not in known:  # of others somebody has decided
            wanted = registry.register(folder, actor=user_name(), note="found in its folder").id
    if wanted is None:
        registry.versions(rule)  # raises for a rule that has none
        remedy = "Train it, or name a version with VERSION=; `make rules` lists them"
        raise GuardError(f"{rule} has no candidate", remedy=remedy)
    return registry.version(rule, wanted)


def previous(registry: Registry, rule: RegisteredRule) -> Version:
    """The champion before this one. Raises GuardError if there was none."""
    version = registry.aliases(rule).get("previous")
    if version is None:
        registry.versions(rule)
        remedy = "Name a version with VERSION=; `make rules` lists them"
        raise GuardError(f"{rule} has no previous version", remedy=remedy)
    return registry.version(rule, version)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.versions",
        description="Versions of rules: list, publish, go back.",
    )
    runs = "the folder of weights and results (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=Runs().root, help=runs)
    commands = parser.add_subparsers(dest="command", required=True, metavar=COMMANDS)
    shown = commands.add_parser("list", help="all versions, and whether the events hold")
    shown.add_argument("--rules", help="comma-separated; default: all")
    shown.add_argument("--files", action="store_true", help="check every version's weights too")
    for name, does in (
        ("publish", "serve a version, by default the candidate"),
        ("rollback", "serve an earlier version again, by default the previous champion"),
        (
            "mode",
            "set for which share of conversations a version decides, by default the candidate",
        ),
    ):
        change = commands.add_parser(name, help=does)
        rules = "separated by commas; all: every rule that has such a version"
        change.add_argument("--rule", required=True, help=rules)
        change.add_argument(
            "--version",
            help="its alias, or the beginning of its id, as `make rules` prints it",
        )
        if name == "mode":
            mode = "enforce, shadow, canary:10%% or off"
            change.add_argument("--mode", required=True, help=mode)
        change.add_argument("--why", required=True, help="the reason, which is kept")
        change.add_argument("--model", default="tiny", help="the base (default: tiny)")
        change.add_argument("--method", help=f"by default the served one: {', '.join(METHODS)}")
    return parser.parse_args()


def change(arguments: argparse.Namespace, registry: Registry, runs: Runs) -> list[Version]:
    """Publish or roll back the named rules or set their modes, all or none of them; the versions.
    Raises GuardError for what the registry or a server would refuse.
    """
    recipe = load_recipe(arguments.model)
    method, requirements = served_method(recipe, arguments.method), Requirements.of(recipe)
    back = arguments.command == "rollback"
    mode = Mode.parse(arguments.mode) if arguments.command == "mode" else None
    alias: Alias = "previous" if back else "candidate"
    if arguments.version in get_args(Alias):
        alias = arguments.version
    chosen: list[Version] = []
    for rule in named_rules(registry, arguments.rule, arguments.model, method, alias):
        if arguments.version:
            named = registry.aliases(rule).get(alias) if arguments.version == alias else None
            version = registry.version(rule, named or arguments.version)
        elif back:
            version = previous(registry, rule)
        else:
            version = candidate(registry, runs, rule)
        requirements.admit(rule.rule, version.folder)  # or no server could start with it
        chosen.append(version)
    actor, why = user_name(), arguments.why
    gates = {version.id: load_rule(version.rule.rule).gate for version in chosen if mode}
    for version in chosen:
        rule = version.rule
        if mode is not None:
            gate = gates[version.id]
            registry.set_mode(rule, version.id, mode, gate=gate, actor=actor, reason=why)
        elif registry.aliases(rule)["champion"] != version.id:
            registry.publish(rule, version.id, actor=actor, reason=why, back=back)
    return chosen


def _as_before(registry: Registry, champion: Version) -> str:
    """A warning where the rule is not enforced, as it was not before either; or nothing."""
    if mode := _mode(champion, registry.rollout(champion.rule)):
        return f", {mode}as before: `make mode VERSION=champion MODE=enforce`"
    return ""


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _arguments()
    runs = Runs(arguments.runs)
    registry = Registry(runs)
    if arguments.command == "list":
        rules = comma_separated(arguments.rules, "rule") if arguments.rules else None
        print(listing(registry, rules))
        registry.verify(files=arguments.files)
        last = registry.events()[-1]
        print(f"\n{last.number:,} events, the chain ends in {last.hash[:SHOWN_DIGITS]}")
        return
    for version in change(arguments, registry, runs):
        name = version.id[:SHOWN_DIGITS]
        if arguments.command == "mode":
            print(f"{version.rule.rule}: the mode of {name} is {Mode.parse(arguments.mode)}")
        else:
            print(f"{version.rule.rule}: the champion is {name}{_as_before(registry, version)}")
    print("served in seconds with WATCH=1, else after POST /admin/rules/RULE or a restart")


if __name__ == "__main__":
    main()
