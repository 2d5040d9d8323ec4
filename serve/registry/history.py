"""What became of a rule: its versions as an operator reads them, and the events that decided it.

Knows nothing of how it is shown.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.twins import TwinRate
from guard.weights.card import read_card
from serve.registry.registry import Alias, Event, RegisteredRule, Registry, Version


class RecordedVersion(Strict):
    """A version of a rule, the aliases that name it, and what its card says, or the `problem` with
    its files. Only a version that may judge has a `mode`. `auroc` is of the validation split.
    """

    version: str
    aliases: tuple[Alias, ...] = ()
    mode: str | None = None
    threshold: float | None = None
    auroc: float | None = None
    twins: TwinRate | None = None  # of the test split
    note: str
    parent: str | None
    problem: str | None = None


class RuleHistory(Strict):
    """A rule's versions, the newest first, and its events, the oldest first."""

    versions: tuple[RecordedVersion, ...] = ()
    events: tuple[Event, ...] = ()


def history(registry: Registry, rule: RegisteredRule) -> RuleHistory:
    """The history of a rule. Raises GuardError if it has no version."""
    versions = registry.versions(rule)
    aliases: defaultdict[str, list[Alias]] = defaultdict(list)
    for alias, version_id in registry.aliases(rule).items():
        aliases[version_id].append(alias)
    modes = {}
    if rollout := registry.rollout(rule):
        modes[rollout.folder] = str(rollout.mode)
        if rollout.trial:
            modes[rollout.trial.folder] = str(rollout.trial.mode)
    described = []
    for version in reversed(versions):
        mode, named = modes.get(version.folder), tuple(aliases[version.id])
        described.append(recorded(version).model_copy(update={"mode": mode, "aliases": named}))
    ids = {version.id for version in versions}
    events = tuple(event for event in registry.events() if event.version in ids)
    return RuleHistory(versions=tuple(described), events=events)


def recorded(version: Version) -> RecordedVersion:
    """The version and its card, by itself."""
    said: dict[str, Any] = {}
    try:
        card = read_card(version.folder)
        said["threshold"] = card.threshold
        said["twins"] = card.twin_rate("test")
        said["auroc"] = card.metrics.get("validation", {}).get("auroc")
    except GuardError as error:
        said["problem"] = error.problem
    return RecordedVersion(version=version.id, note=version.note, parent=version.parent, **said)
