"""Versions of a rule's weights: which are served when, and which one a verdict's logit shows.

Knows nothing of servers.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from guard.conversation.example import Message
from guard.recipe import Recipe
from guard.weights.card import read_card
from serve.bench.scores import judged
from serve.engine import GuardEngine

SCALE = 0.5  # standard deviation of the weights: large, so that versions score differently
TOLERANCE = 0.05  # nats of a logit between two batches of different make-up, in bfloat16
TOLD_APART = 3 * TOLERANCE  # versions whose logits are nearer cannot be told apart

Outcome = Literal["right", "wrong_version", "no_version", "told_nothing"]


@dataclass
class ServedSpans:
    """The spans of time in which each version of a rule is served, by time.perf_counter.

    While a rule is being replaced, both versions are served.
    """

    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def start(self, version: int) -> None:
        """Note that a version may answer from now on."""
        self.spans.append((version, time.perf_counter(), float("inf")))

    def end_previous(self) -> None:
        """Note that the version before the last may no longer answer."""
        version, since, _ = self.spans[-2]
        self.spans[-2] = (version, since, time.perf_counter())

    def between(self, sent: float, answered: float) -> set[int]:
        """The versions that were served at some time between a check's request and its answer."""
        meanwhile: set[int] = set()
        for version, since, until in list(self.spans):
            if since <= answered and until >= sent:
                meanwhile.add(version)
        return meanwhile


def expected_logits(
    recipe: Recipe,
    versions: Mapping[str, Sequence[Path]],
    conversations: Sequence[tuple[Message, ...]],
) -> list[dict[str, list[float]]]:
    """The logits that each rule's versions give each conversation, from an engine of its own.

    Raises GuardError for a refusal.
    """
    folders: dict[str, Path] = {}
    for rule, rule_versions in versions.items():
        for number, folder in enumerate(rule_versions):
            folders[f"{rule}@{number}"] = folder
    logits: list[dict[str, list[float]]] = []
    with GuardEngine(recipe, folders) as engine:
        for messages in conversations:
            check = judged(engine.check(messages), where="the expected logits")
            by_rule: dict[str, list[float]] = {rule: [] for rule in versions}
            for verdict in check.verdicts:  # in the order of the folders
                rule = verdict.rule.partition("@")[0]
                by_rule[rule].append(logit_of(verdict.p_violation))
            logits.append(by_rule)
    return logits


def logit_of(p: float) -> float:
    """The uncalibrated logit of a probability: random adapters' cards leave it as it is."""
    return math.log(p) - math.log1p(-p)


def outcome(logit: float, version_logits: Sequence[float], served: set[int]) -> Outcome:
    """What a verdict's logit shows about the weights that gave it.

    It shows nothing where a version that was served and one that was not have nearly the same
    logit.
    """
    near: set[int] = set()
    for version, version_logit in enumerate(version_logits):
        if abs(logit - version_logit) <= TOLERANCE:
            near.add(version)
    if not near:
        return "no_version"
    if not near & served:
        return "wrong_version"
    for version, not_served in itertools.product(near & served, range(len(version_logits))):
        if not_served in served:
            continue
        if abs(version_logits[version] - version_logits[not_served]) < TOLD_APART:
            return "told_nothing"
    return "right"


def put_in_place(version: Path, folder: Path) -> None:
    """Replace a rule's folder as training does at its end: by a folder that is complete."""
    part = folder.with_name("part")
    shutil.copytree(version, part)
    read_card(part).model_copy(update={"rule": folder.parent.name}).save(part)
    replaced = folder.rename(folder.with_name("replaced"))
    part.rename(folder)
    shutil.rmtree(replaced)
