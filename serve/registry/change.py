"""What a person decides about a version of a rule: to publish it, to step back to it, or its mode.

The command line and HTTP decide by the same functions. Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.home import own_or_shipped
from guard.layout import Runs
from guard.rule import RULES, Gate, load_rule
from guard.weights.card import CARD, ZERO, check_rule, read_card
from serve.registry.registry import Alias, RegisteredRule, Registry, Version
from serve.registry.rollout import OFF, SHOWN_DIGITS, Mode, Rollout

Action = Literal["publish", "rollback", "mode"]

THE_SERVER = "the server"  # who takes back what it cannot serve


class RolloutChange(Strict):
    """A decision. `version` is an alias or the beginning of an id, by default the candidate, or the
    previous one to step back to. `champion` is who it is to replace, by default whoever is.
    """

    action: Action
    actor: str
    reason: str
    version: str | None = None
    mode: Mode = OFF
    champion: str | None = None
    is_forced: bool = False  # published although its figures are against it

    @property
    def alias(self) -> Alias:
        """The alias that is named or meant."""
        meant: Alias = "previous" if self.action == "rollback" else "candidate"
        return next((alias for alias in get_args(Alias) if alias == self.version), meant)


@dataclass(frozen=True)
class PreparedChange:
    """A decision about one rule that nothing is known to stand against, and what was before."""

    registry: Registry
    change: RolloutChange
    version: Version
    aliases: Mapping[Alias, str]
    before: Rollout
    gate: Gate
    approvals: int  # of different people, without which it is noted alone

    @property
    def champion(self) -> str:
        return self.aliases["champion"]

    @property
    def begins_trial(self) -> bool:
        is_mode = self.change.action == "mode" and self.change.mode != OFF
        return is_mode and self.version.id != self.champion

    def carry_out(self) -> int:
        """Record it; how many approvals the version has. Too few change nothing else.

        Raises GuardError for what the registry refuses.
        """
        change, version = self.change, self.version.id
        if change.action == "mode":
            self._set_mode(version, change.mode, self.gate, change.actor, change.reason)
            return 1
        if version == self.champion and change.version is None:
            return self.approvals  # it became champion as it was registered
        return self.registry.publish(
            self.version.rule,
            version,
            actor=change.actor,
            reason=change.reason,
            back=change.action == "rollback",
            champion=change.champion or self.champion,
            approvals=self.approvals,
        )

    def undo(self, reason: str) -> None:
        """Decide that all is as it was before."""
        version, trial = self.version, self.before.trial
        if self.change.action != "mode":
            self.registry.revert(version, self.aliases, trial, actor=THE_SERVER, reason=reason)
            return
        mode, gate = OFF, self.gate
        if version.id == self.champion:
            mode = self.before.mode
        elif trial is not None:  # no other version may have been on trial
            mode, gate = trial.mode, trial.gate
        self._set_mode(version.id, mode, gate, THE_SERVER, reason)

    def _set_mode(self, version: str, mode: Mode, gate: Gate, actor: str, reason: str) -> None:
        rule = self.version.rule
        self.registry.set_mode(rule, version, mode, gate=gate, actor=actor, reason=reason)


def prepared(
    registry: Registry,
    runs: Runs,
    rule: RegisteredRule,
    change: RolloutChange,
    admit: Callable[[str, Path], object],
    zero: Callable[[str], str | None] = lambda _: None,
) -> PreparedChange:
    """The decision about this rule, whose version a server will `admit`; `zero` gives its version
    0, to which it steps back where there is no other. Raises GuardError where
    there is no such version, or no server could start with it.
    """
    version = _named(registry, runs, rule, change, zero)
    before = registry.rollout(rule)
    assert before is not None  # the first version of a rule is its champion
    is_zero = version.id.startswith(ZERO)
    if is_zero and change.action != "mode" and before.folder.name.startswith(ZERO):
        remedy = "Edit the file; weights that are trained follow it"
        raise GuardError(f"{rule}: its version 0 is what the rule's file says", remedy=remedy)
    if change.action == "rollback" and not is_zero and not registry.was_champion(version):
        got, remedy = version.id[:SHOWN_DIGITS], "`make publish` makes it the champion"
        raise GuardError(f"{rule}: a version that was never champion", got=got, remedy=remedy)
    admit(rule.rule, version.folder)
    gate, approvals = Gate(), 1
    if change.action == "mode":
        gate = load_rule(rule.rule).gate
    elif change.action == "publish" and own_or_shipped(RULES / f"{rule.rule}.yaml").is_file():
        stated = load_rule(rule.rule)
        approvals = stated.approvals
        if not change.is_forced:
            _refuse_over_refusal(version, stated.max_fpr_twins)
    worse = read_card(version.folder).worse_than_reader
    if change.action == "publish" and worse and not change.is_forced:
        remedy = "Train it on more rows, or `make publish FORCE=1`"
        raise GuardError(f"{rule}: it is worse than the reader", got=worse, remedy=remedy)
    aliases = registry.aliases(rule)
    return PreparedChange(registry, change, version, aliases, before, gate, approvals)


def _refuse_over_refusal(version: Version, largest: float | None) -> None:
    """Raise GuardError where the whole interval of the test twins' rate is above the `largest`."""
    rate = read_card(version.folder).twin_rate("test")
    if largest is None or rate is None or rate.is_within(largest):
        return
    problem = f"{version.rule}: flags more of the test split's twins than max_fpr_twins"
    got = f"{version.id[:SHOWN_DIGITS]}: {rate} of {rate.n}, max_fpr_twins {largest:g}"
    remedy = "Train it on more of them, raise max_fpr_twins, or `make publish FORCE=1`"
    raise GuardError(problem, got=got, remedy=remedy)


def _named(
    registry: Registry,
    runs: Runs,
    rule: RegisteredRule,
    change: RolloutChange,
    zero: Callable[[str], str | None],
) -> Version:
    """The version that is named or meant. Raises GuardError if there is none."""
    wanted = change.version
    if wanted is None and change.alias == "candidate":
        wanted = _registered(registry, runs.adapter(*rule), rule, change.actor)
    if wanted is None and change.action == "rollback" and _was_rolled_back(registry, rule):
        remedy = "Name the version (VERSION=), or publish one; `make rules` lists them"
        raise GuardError(f"{rule} was rolled back already", remedy=remedy)
    if wanted is None:
        wanted = registry.aliases(rule).get(change.alias)
    if wanted is None and change.alias == "previous":
        wanted = zero(rule.rule)
    if wanted is None:
        registry.versions(rule)  # raises for a rule that has none
        remedy = "Train it, or name a version with VERSION=; `make rules` lists them"
        if change.alias == "previous":
            remedy = "Only one version was ever its champion"
        raise GuardError(f"{rule} has no {change.alias} version", remedy=remedy)
    return registry.version(rule, wanted)


def _was_rolled_back(registry: Registry, rule: RegisteredRule) -> bool:
    """Whether a person's roll back made the champion: another one would bring back what was bad."""
    versions = [version.id for version in registry.versions(rule)]
    crowned = [event for event in registry.events() if event.kind in ("published", "rolled_back")]
    crowned = [event for event in crowned if event.version in versions]
    return crowned[-1].kind == "rolled_back" and crowned[-1].actor != THE_SERVER


def _registered(registry: Registry, folder: Path, rule: RegisteredRule, actor: str) -> str | None:
    """What lies in the rule's folder, now registered, say because it was trained elsewhere. None if
    that is a version already: of others somebody has decided.
    """
    if not (folder / CARD).is_file():
        return None
    card = read_card(folder)
    check_rule(card, rule.rule, folder)
    if RegisteredRule.of(card) != rule:
        problem, remedy = "weights of another base or method", "Put them into their own folder"
        raise GuardError(problem, where=folder, got=RegisteredRule.of(card), remedy=remedy)
    known = registry.versions(rule) if registry.aliases(rule) else []
    if card.version in [version.id for version in known]:
        return None
    named = {"actor": actor, "note": "found in its folder"}
    return registry.register(folder, **named, follows_zero=False).id  # `publish` asks for approvals
