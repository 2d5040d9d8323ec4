"""Which versions of a rule judge a conversation, and which of them decides.

A canary decides for a share of the conversations, by a hash of what a conversation's requests have
in common, so that it goes on deciding, or not, as a conversation grows. What does not decide is
counted and audited, and its caller sees its tokens alone. Where a canary has no verdict its
champion decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from guard.verdict import Verdict
from serve.api.observe.record import JudgedVersion
from serve.engine import Check, Refusal
from serve.registry.rollout import ENFORCE, OFF, Mode, Rollout, trial_name

KEY_DIGITS = 13  # of a conversation's key, hexadecimal: all that a float holds


class AskedVersion(NamedTuple):
    """A version of a rule in a check: what an engine calls it, and for which share it decides.

    A champion's `version` is what answers.
    """

    name: str
    mode: Mode
    version: str = ""

    def decides_at(self, point: float) -> bool:
        return point < (self.mode.share or 0)


class SettledCheck(NamedTuple):
    """A check as its caller gets it: by the versions that decide. Of each rule of which not all is
    enforced, what every version `said`. `conversation` is its key.
    """

    check: Check
    said: Sequence[JudgedVersion] = ()
    conversation: str = ""


class Assignment:
    """What an engine is asked for a check of these rules, and what its answers mean.

    `key` is the conversation's. Where the check is nobody's answer, no version is asked that could
    not decide.
    """

    def __init__(
        self, rollouts: Mapping[str, Rollout], rules: Sequence[str], key: str, *, is_answer: bool
    ) -> None:
        self._key = key
        self._point = int(key[:KEY_DIGITS], 16) / 16**KEY_DIGITS
        self._asked: dict[str, list[AskedVersion]] = {}
        self._on_trial: set[str] = set()
        for rule in rules:
            versions = [AskedVersion(rule, ENFORCE)]
            rollout = rollouts.get(rule)
            if rollout is not None and rollout.is_on_trial:
                self._on_trial.add(rule)
                versions = _versions(rule, rollout)
            if not is_answer:
                versions = [version for version in versions if version.decides_at(self._point)]
            self._asked[rule] = versions

    @property
    def names(self) -> list[str]:
        """What is asked, as an engine calls it."""
        return [version.name for versions in self._asked.values() for version in versions]

    def settled(self, check: Check) -> SettledCheck:
        """What the engine's answers mean."""
        if not self._on_trial:
            return SettledCheck(check, conversation=self._key)
        found = {verdict.rule: verdict for verdict in check.verdicts}
        verdicts: list[Verdict] = []
        refused: dict[str, Refusal] = {}
        versions: dict[str, str] = {}
        said: list[JudgedVersion] = []
        undecided: list[str] = []
        for rule, asked in self._asked.items():
            deciding = self._deciding(asked, found)
            if deciding is None:
                undecided.append(rule)
            elif deciding in found:
                verdicts.append(found[deciding]._replace(rule=rule))
            elif deciding in check.refused:
                refused[rule] = check.refused[deciding]
            if deciding is not None and deciding in check.versions:
                versions[rule] = check.versions[deciding]
            for name, mode, version in asked if rule in self._on_trial else ():
                refusal = check.refused.get(name)
                said.append(
                    JudgedVersion(
                        rule=rule,
                        version=version or check.versions.get(name, ""),
                        is_trial=name != rule,
                        mode=str(mode),
                        decides=name == deciding,
                        verdict=found.get(name),
                        code=refusal.code if refusal else None,
                    )
                )
        settled = replace(
            check,
            verdicts=tuple(verdicts),
            refused=refused,
            versions=versions,
            latencies_ms={},
            undecided=tuple(undecided),
        )
        return SettledCheck(settled, said, self._key)

    def _deciding(self, asked: Sequence[AskedVersion], found: Mapping[str, Verdict]) -> str | None:
        """Of the versions that may decide, the first that has a verdict, or else the last."""
        may = [version.name for version in asked if version.decides_at(self._point)]
        for name in may:
            if name in found:
                return name
        return may[-1] if may else None


def _versions(rule: str, rollout: Rollout) -> list[AskedVersion]:
    """What is judged of a rule: its version on trial, then its champion; none of a rule that is
    off.
    """
    if rollout.mode == OFF:
        return []
    versions = [AskedVersion(rule, rollout.mode)]
    if rollout.trial is not None:
        version = rollout.trial.version
        versions.insert(0, AskedVersion(trial_name(rule, version), rollout.trial.mode, version))
    return versions
