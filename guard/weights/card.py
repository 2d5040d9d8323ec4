"""`card.json` beside every rule's weights: what they answer, on which base, how well.

A version of a rule is one set of weights with its card. `Card.version` identifies it everywhere: it
changes with whatever decides an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator

from guard.conversation.example import Split
from guard.coverage import Coverage
from guard.errors import GuardError, choose_from
from guard.files.atomic import atomic_write
from guard.files.strict_json import load_json
from guard.files.yaml_file import Strict, validate
from guard.layout import fingerprint
from guard.method import METHODS, OPTIONAL_FILES
from guard.rule import Reads
from guard.twins import TwinRate
from guard.verdict import Calibration

CARD = "card.json"
ZERO = "0-"  # begins the version of a rule without weights of its own
BESIDE = "@"  # between a rule and its version in an engine's names; no rule has one
VERSION = "version"  # the key of `Card.version` in the file
LEFT_OUT = {"max_fpr_twins", "untrained", "composed_of"}  # keys that a file may lack
READER_RULE = "reader"  # of the reader's own card
TWINS = "twins"  # the key of a split's `TwinRate` in the metrics
COMPOSITION = "composition"  # the key of a composed adapter's verdicts beside its parents'
RESTORE = "Train again or restore the folder"
FORCE = "Run `make train` for this rule, with FORCE=1"  # which would keep an old card otherwise

Untrained = Literal["reader", "base"]
ThresholdBy = Literal["rule", "max_fpr", "threshold"]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Card(Strict):
    """The provenance and calibration of one rule's weights."""

    rule: str
    rule_text: str
    rule_hash: str
    # PromptBuilder.hash: how text is read, the instruction, the rendering, the answer prefix.
    prompt_hash: str
    answer_hash: str  # weights.head.answer_hash: how words, heads and calibrations are computed
    # The turns that an encoder's head reads, as the rule says; on any other base, all of them.
    reads: Reads = "conversation"
    method: str  # a name of guard.method.METHODS
    model: str
    base: str
    base_revision: str
    data_hash: str
    # The hash of test.jsonl alone: versions with different training rows can be compared on it.
    test_sha256: str
    seed: int
    recipe: dict[str, Any]
    versions: dict[str, str]
    metrics: dict[str, Any]
    temperature: float = Field(gt=0, allow_inf_nan=False)
    bias: float = Field(allow_inf_nan=False)
    threshold: Probability
    uncertainty_band: tuple[Probability, Probability]
    # The conversations on which a verdict may be confident; None, of random weights: all.
    coverage: Coverage | None
    # The false-positive rate that the threshold was chosen for; None: it is balanced, or stated.
    max_fpr: Probability | None
    # As much of twins; left out where there is none, as of cards from before there were twins.
    max_fpr_twins: Probability | None = Field(default=None, exclude_if=lambda rate: rate is None)
    # What chose the threshold: the rule's file, or a `max_fpr` or `threshold` of `make calibrate`.
    threshold_by: ThresholdBy = "rule"
    # SHA-256 of each file beside the card that decides an answer (`Method.files`), by its name.
    files: dict[str, str]
    # What pins the base that the weights were merged into; None: they lie beside the card.
    merged_revision: str | None = None
    # The versions of the rules' weights that these are composed of, by rule; None: of none.
    composed_of: dict[str, str] | None = Field(default=None, exclude_if=lambda of: of is None)
    # What judges a rule without weights of its own; None: its own weights.
    untrained: Untrained | None = Field(default=None, exclude_if=lambda by: by is None)

    @field_validator("method")
    @classmethod
    def _is_known(cls, method: str) -> str:
        if method not in METHODS:
            raise ValueError(f"no such method. {choose_from(method, METHODS)}")
        return method

    @property
    def retrain(self) -> str:
        if READER_RULE in (self.rule, self.untrained):
            return f"make reader MODEL={self.model}"
        command = f"make train RULE={self.rule} MODEL={self.model} METHOD={self.method}"
        if self.seed:
            command += f" SEEDS={self.seed}"
        return command

    @property
    def remedy(self) -> str:
        return f"Train it again: `{self.retrain}`"

    @property
    def by(self) -> str:
        """What answers: the reader, the bare base, or weights of a method."""
        return self.untrained or self.method

    @property
    def calibration(self) -> Calibration:
        return Calibration(
            self.temperature, self.threshold, self.bias, self.uncertainty_band, self.coverage
        )

    def twin_rate(self, split: Split) -> TwinRate | None:
        """How many twins of a split are flagged; None of a card from before there were twins."""
        measured = self.metrics.get(split, {}).get(TWINS)
        return measured and validate(measured, TwinRate, where=f"{self.rule}: {split}")

    @property
    def worse_than_reader(self) -> str:
        """How far the loss is above the reader's where it surely is, in words; else empty."""
        compared = self.metrics.get("day_zero", {})
        low, high = compared.get("loss_above_reader_ci95", (0.0, 0.0))
        if low <= 0:
            return ""
        return f"{compared['loss_above_reader']:+.3f} nats [{low:+.3f}, {high:+.3f}]"

    @cached_property
    def version(self) -> str:
        """Identifies these weights: it covers every field, so whatever decides an answer."""
        digest = fingerprint(self.model_dump(mode="json"))
        if self.untrained is not None:
            return ZERO + digest
        return digest

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return type(self)(**(self.model_dump() | dict(update or {})))

    def save(self, folder: Path) -> None:
        content = self.model_dump(mode="json") | {VERSION: self.version}
        text = json.dumps(content, indent=2, ensure_ascii=False)
        with atomic_write(folder / CARD) as part:
            part.write_text(text + "\n", encoding="utf-8")


def load_card(folder: Path) -> Card:
    card = read_card(folder)
    digests: dict[str, str] = {}
    if card.untrained != "base":
        digests = file_digests(folder, card.method)
    check_files(card, digests, folder)
    return card


def check_files(card: Card, digests: Mapping[str, str], folder: Path) -> None:
    for name in sorted(card.files.keys() | digests.keys()):
        if card.files.get(name) != digests.get(name):
            problem = f"the weights are not those of the card: {name} is another file"
            got = digests.get(name, "no such file")[:12]
            raise GuardError(problem, where=folder, got=got, remedy=RESTORE)


def rule_of(name: str) -> str:
    """The rule of what an engine serves: of RULE, and of RULE@VERSION beside it."""
    return name.partition(BESIDE)[0]


def check_rule(card: Card, name: str, folder: Path) -> None:
    """The verdicts of another rule's card would pass for this one's."""
    rule = rule_of(name)
    if card.rule != rule:
        problem = f"the weights are not of the rule {rule!r}"
        remedy = f"Run `make train RULE={rule}`, or put the folder where its own rule's weights are"
        raise GuardError(problem, where=folder, got=card.rule, remedy=remedy)


def read_card(folder: Path) -> Card:
    """The card, with no look at the weights."""
    path = folder / CARD
    if not path.is_file():
        problem = f"no {CARD}: not finished weights"
        if not folder.is_dir():
            problem += "; there is no such folder"
        raise GuardError(problem, where=folder, remedy="Run `make train` for this rule")
    content = load_json(path, remedy=RESTORE)
    stated = content.pop(VERSION, None) if isinstance(content, dict) else None
    card = validate(content, Card, where=path, remedy=FORCE)
    if stated != card.version:
        problem = f"the card was edited: its version is {card.version[:12]} now"
        remedy = "Restore it or run `make train`; `make calibrate` chooses another threshold"
        raise GuardError(problem, where=path, got=str(stated)[:12], remedy=remedy)
    return card


def file_digests(folder: Path, method: str) -> dict[str, str]:
    """SHA-256 by name of each file that decides what weights of this method answer."""
    digests: dict[str, str] = {}
    for name in METHODS[method].files:
        try:
            with (folder / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            if name == METHODS[method].weights or name not in OPTIONAL_FILES:
                raise GuardError(f"no {name}", where=folder, remedy=FORCE) from None
        except OSError as error:
            raise GuardError(f"cannot be read: {error}", where=folder, remedy=FORCE) from error
    return digests
