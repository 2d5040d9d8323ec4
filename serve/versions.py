"""The registry from the command line: `make rules` and what decides or exchanges versions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from guard.arguments import comma_separated
from guard.errors import GuardError, choose_from, exits_cleanly
from guard.layout import Runs
from guard.method import METHODS
from guard.recipe import load_recipe
from serve.engine.adapter import Requirements
from serve.registry.change import PreparedChange, RolloutChange, prepared
from serve.registry.history import RecordedVersion, history
from serve.registry.mlflow import MlflowRegistry, model_name
from serve.registry.registry import Alias, Event, RegisteredRule, Registry, user_name
from serve.registry.rollout import ENFORCE, OFF, SHOWN_DIGITS, Mode
from serve.selection import served_method
from serve.untrained import UntrainedRules

COMMANDS = "list|publish|rollback|mode|push|pull"

EXCHANGES = ("push", "pull")
OF_TWINS = 20  # characters of a rate with its interval


def listing(registry: Registry, rules: list[str] | None = None) -> str:
    """Every version of the rules, newest first, with its aliases. Raises GuardError for rules
    without versions.
    """
    figures = f"threshold  AUROC  {'FPR on twins':<{OF_TWINS}}"
    lines = [f"{'version':<{SHOWN_DIGITS}}  {'alias':<9}  {figures}  mode, note, folder"]
    found = [rule for rule in registry.rules() if rules is None or rule.rule in rules]
    missing = set(rules or ()) - {rule.rule for rule in found}
    if missing or not found:
        remedy = "Run `make train`"
        if missing:
            remedy += f". {choose_from(min(missing), [rule.rule for rule in registry.rules()])}"
        got = ", ".join(sorted(missing)) or None
        raise GuardError("no versions", where=registry.file, got=got, remedy=remedy)
    for rule in found:
        lines.append(f"\n{rule.rule}, {METHODS[rule.method].label} on {rule.model}")
        told = history(registry, rule)
        lines += [_line(version, registry.folder(version.version)) for version in told.versions]
        if rules is not None:
            lines += [_event(event) for event in told.events]
    return "\n".join(lines)


def _event(event: Event) -> str:
    what = f"{event.kind} {event.mode}".strip()
    return f"{event.at}  {event.actor}: {what} {event.version[:SHOWN_DIGITS]}, {event.reason}"


def _line(version: RecordedVersion, folder: Path) -> str:
    named = f"{version.version[:SHOWN_DIGITS]}  {', '.join(version.aliases):<9}"
    where = f"{version.note}, {folder}"
    if version.mode not in (None, str(ENFORCE)):
        where = f"{version.mode}, {where}"
    if version.problem:
        return f"{named}  {version.problem}  {where}"
    auroc = float("nan") if version.auroc is None else version.auroc
    twins = str(version.twins or "-")
    return f"{named}  {version.threshold:9.3f}  {auroc:5.3f}  {twins:<{OF_TWINS}}  {where}"


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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.versions", description="Versions of rules: list, publish, go back."
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
        ("push", "keep a version in an MLflow model registry, by default the champion"),
        ("pull", "register a version of an MLflow model registry, by default its champion"),
    ):
        change = commands.add_parser(name, help=does)
        rules = "separated by commas; all: every rule that has such a version"
        change.add_argument("--rule", help=rules)
        change.add_argument(
            "--version", help="its alias, or the beginning of its id, as `make rules` prints it"
        )
        change.set_defaults(force=False)
        if name == "publish":
            force = "although it is worse than the reader or flags more twins than max_fpr_twins"
            change.add_argument("--force", action="store_true", help=force)
        if name == "mode":
            mode = "enforce, shadow, canary:10%% or off"
            change.add_argument("--mode", required=True, help=mode)
        if name in EXCHANGES:
            change.add_argument("--mlflow", required=True, help="the address of an MLflow server")
        else:
            change.add_argument("--why", required=True, help="the reason, which is kept")
        change.add_argument("--model", default="tiny", help="the base (default: tiny)")
        change.add_argument("--method", help=f"by default the served one: {', '.join(METHODS)}")
    return parser.parse_args()


def decide(arguments: argparse.Namespace, registry: Registry, runs: Runs) -> Iterator[str]:
    """Publish or roll back the named rules or set their modes, all or none of them; a line for each
    rule. Raises GuardError for what the registry or a server would refuse.
    """
    recipe = load_recipe(arguments.model)
    method, requirements = served_method(recipe, arguments.method), Requirements.of(recipe)
    change = RolloutChange(
        action=arguments.command,
        actor=user_name(),
        reason=arguments.why,
        version=arguments.version,
        mode=Mode.parse(arguments.mode) if arguments.command == "mode" else OFF,
        is_forced=arguments.force,
    )
    rules = named_rules(registry, arguments.rule, arguments.model, method, change.alias)
    admit, zero = requirements.admit, UntrainedRules(recipe, method, registry).zero
    all_prepared = [prepared(registry, runs, rule, change, admit, zero) for rule in rules]
    for of_rule in all_prepared:
        yield _carried_out(of_rule)


def exchanged(arguments: argparse.Namespace, registry: Registry) -> Iterator[str]:
    """Push versions of the named rules to MLflow, or pull them; a line for each rule. Raises
    GuardError where either side refuses.
    """
    method = served_method(load_recipe(arguments.model), arguments.method)
    server, named = MlflowRegistry(arguments.mlflow), arguments.version or "champion"
    for rule in named_rules(registry, arguments.rule, arguments.model, method, "champion"):
        if arguments.command == "pull":
            pulled = server.pull(registry, rule, named)
            yield f"{rule.rule}: registered {pulled.id[:SHOWN_DIGITS]}; `make rules` lists it"
        else:
            version = registry.version(rule, named)
            number = server.push(registry, version)
            name = version.id[:SHOWN_DIGITS]
            yield f"{rule.rule}: {name} is version {number} of {model_name(rule)}"


def _carried_out(prepared: PreparedChange) -> str:
    rule, change = prepared.version.rule.rule, prepared.change
    name = prepared.version.id[:SHOWN_DIGITS]
    approvals = prepared.carry_out()
    if change.action == "mode":
        return f"{rule}: the mode of {name} is {change.mode}"
    if approvals < prepared.approvals:
        return (
            f"{rule}: {name} has {approvals} of {prepared.approvals} approvals, and is not served"
        )
    return f"{rule}: the champion is {name}{_as_before(prepared)}"


def _as_before(prepared: PreparedChange) -> str:
    """A warning where the rule is not enforced, as it was not before either; or nothing."""
    if prepared.before.mode == ENFORCE:
        return ""
    mode = f"{prepared.before.mode}, as before"
    return f", {mode}: `make mode VERSION=champion MODE=enforce`"


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
    if arguments.rule is None:
        raise GuardError("which rule?", remedy="Name it: RULE=medical_advice, or RULE=all")
    if arguments.command in EXCHANGES:
        for line in exchanged(arguments, registry):
            print(line)
        return
    for line in decide(arguments, registry, runs):
        print(line)
    print("served in seconds with WATCH=1, else after POST /admin/rules/RULE or a restart")


if __name__ == "__main__":
    main()
