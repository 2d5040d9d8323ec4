"""How far a version of a rule is rolled out: for which share of conversations it decides.

enforce      for all of them
shadow       for none: it is judged and counted
canary:10%   for a share, chosen by a hash of the conversation; for the rest it is a shadow
off          it is not judged
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple, Self

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.rule import Gate
from guard.weights.card import BESIDE

ModeName = Literal["enforce", "shadow", "canary", "off"]

SHOWN_DIGITS = 12  # of a version, as everywhere
CANARY = re.compile(r"canary:(\d{1,2}(?:\.\d{1,3})?)%")


class Mode(Strict):
    """The share of the conversations for which a version decides; None where it is not judged."""

    share: float | None = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of one of the forms above. Raises GuardError for another one, and a share of none."""
        fixed = {"enforce": 1.0, "shadow": 0.0, "off": None}
        if text in fixed:
            return cls(share=fixed[text])
        percent = CANARY.fullmatch(text)
        if percent is None or not float(percent[1]):
            remedy = "Say enforce, shadow, off, or canary:10% for any share above 0 and below 100"
            raise GuardError("no mode", got=repr(text), remedy=remedy)
        return cls(share=float(percent[1]) / 100)

    @property
    def name(self) -> ModeName:
        if self.share is None:
            return "off"
        if self.share == 1:
            return "enforce"
        return "canary" if self.share else "shadow"

    def __str__(self) -> str:
        if self.name == "canary":
            return f"canary:{100 * (self.share or 0):g}%"
        return self.name


ENFORCE, OFF = Mode(), Mode(share=None)


class TrialVersion(Strict):
    """A version that is judged beside its rule's champion, and what takes it back. `since` is the
    event that set its mode: the same version later is another trial.
    """

    version: str
    folder: Path
    mode: Mode
    gate: Gate = Gate()
    since: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.version, self.since


class Rollout(Strict):
    """What of a rule is served: its champion from `folder`, and another version on trial."""

    folder: Path
    mode: Mode = ENFORCE
    trial: TrialVersion | None = None

    @property
    def is_on_trial(self) -> bool:
        """Whether not all that is judged decides."""
        return self.trial is not None or self.mode != ENFORCE


class TakenBack(NamedTuple):
    """A trial that is over beside a rule's champion, and why."""

    rule: str
    trial: TrialVersion
    reason: str


def trial_name(rule: str, version: str) -> str:
    """What an engine calls a rule's version on trial."""
    return f"{rule}{BESIDE}{version[:SHOWN_DIGITS]}"
