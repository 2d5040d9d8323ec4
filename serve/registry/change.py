"""What a person decides about a version of a rule: to publish it, to step back to it, or its mode.

The command line and HTTP decide by the same functions. Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.home import own_or_shipped
from guard.layout import Runs
from guard.rule import RULES, Gate, load_rule
from guard.weights.card import CARD, check_rule, read_card
from serve.registry.registry import Alias, RegisteredRule, Registry, Version
from serve.registry.rollout import OFF, Mode, Rollout

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

    @property
    def alias(self) -> Alias:
        """The alias that is named or meant."""
        meant: Alias = "previous" if self.action == "rollback" else "candidate"
        return next((alias for alias in get_args(Alias) if alias == self.version), meant)


@dataclass(frozen=True)
class PreparedChange:
    """A decision about one rule that nothing is known to stand against, and what was `before`."""

    registry: Registry
    change: RolloutChange
    version: Version
    champion: str
    before: Rollout
    gate: Gate
    approvals: int  # of different people, without which it is noted alone

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
            champion=change.champion,
            approvals=self.approvals,
        )

    def undo(self, reason: str) -> None:
        """Decide that all is as it was before."""
        version, earlier = self.version, self.before.trial
        if self.change.action != "mode":
            back = version.rule, self.champion
            self.registry.publish(
                *back, actor=THE_SERVER, reason=reason, back=True, champion=version.id
            )
        elif version.id == self.champion:
            self._set_mode(version.id, self.before.mode, self.gate, THE_SERVER, reason)
            return
        elif earlier is None:
            self._set_mode(version.id, OFF, self.gate, THE_SERVER, reason)
        if earlier is not None:
            self._set_mode(earlier.version, earlier.mode, earlier.gate, THE_SERVER, reason)

    def _set_mode(self, version: str, mode: Mode, gate: Gate, actor: str, reason: str) -> None:
        rule = self.version.rule
        self.registry.set_mode(rule, version, mode, gate=gate, actor=actor, reason=reason)


def prepared(
    registry: Registry,
    runs: Runs,
    rule: RegisteredRule,
    change: RolloutChange,
    admit: Callable[[str, Path], object],
) -> PreparedChange:
    """The decision about this rule, whose version a server will `admit`. Raises GuardError where
    there is no such version, or no server could start with it.
    """
    version = _named(registry, runs, rule, change)
    admit(rule.rule, version.folder)
    before = registry.rollout(rule)
    assert before is not None  # the first version of a rule is its champion
    champion = registry.aliases(rule)["champion"]
    gate, approvals = Gate(), 1
    if change.action == "mode":
        gate = load_rule(rule.rule).gate
    elif change.action == "publish" and own_or_shipped(RULES / f"{rule.rule}.yaml").is_file():
        approvals = load_rule(rule.rule).approvals
    return PreparedChange(registry, change, version, champion, before, gate, approvals)


def _named(registry: Registry, runs: Runs, rule: RegisteredRule, change: RolloutChange) -> Version:
    if change.version is not None:
        return registry.version(rule, change.version)
    if change.alias == "previous":
        return _previous(registry, rule)
    return _candidate(registry, runs, rule, change.actor)


def _candidate(registry: Registry, runs: Runs, rule: RegisteredRule, actor: str) -> Version:
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
            wanted = registry.register(folder, actor=actor, note="found in its folder").id
    if wanted is None:
        registry.versions(rule)  # raises for a rule that has none
        remedy = "Train it, or name a version with VERSION=; `make rules` lists them"
        raise GuardError(f"{rule} has no candidate", remedy=remedy)
    return registry.version(rule, wanted)


def _previous(registry: Registry, rule: RegisteredRule) -> Version:
    """The champion before this one. Raises GuardError if there was none."""
    version = registry.aliases(rule).get("previous")
    if version is None:
        registry.versions(rule)
        remedy = "Name a version with VERSION=; `make rules` lists them"
        raise GuardError(f"{rule} has no previous version", remedy=remedy)
    return registry.version(rule, version)
