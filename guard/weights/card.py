"""`card.json` beside every rule's weights: what they answer, on which base, how well.

Knows nothing of tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from guard.errors import GuardError, choose_from
from guard.files.atomic import atomic_write
from guard.files.json_file import load_json
from guard.files.yaml_file import Strict, validate
from guard.method import METHODS, PEFT_WEIGHTS, WORDS
from guard.rule import Reads
from guard.verdict import Calibration

CARD = "card.json"

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Card(Strict):
    """The provenance and calibration of one rule's weights."""

    rule: str
    rule_text: str
    rule_hash: str
    prompt_hash: str  # PromptBuilder.hash: the instruction, the rendering, the answer prefix
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
    # The rule's max_fpr that the threshold was chosen for; None: the threshold is balanced.
    max_fpr: Probability | None
    weights_sha256: str

    @field_validator("method")
    @classmethod
    def _is_known(cls, method: str) -> str:
        if method not in METHODS:
            raise ValueError(f"no such method. {choose_from(method, METHODS)}")
        return method

    @property
    def retrain(self) -> str:
        """The command that trains these weights again, and no others of the rule."""
        command = f"make train RULE={self.rule} MODEL={self.model} METHOD={self.method}"
        if self.seed:
            command += f" SEEDS={self.seed}"
        return command

    @property
    def remedy(self) -> str:
        """The remedy of an error about these weights."""
        return f"Train it again: `{self.retrain}`"

    @property
    def calibration(self) -> Calibration:
        """How this adapter's logit becomes a verdict."""
        return Calibration(self.temperature, self.threshold, self.bias, self.uncertainty_band)

    def save(self, folder: Path) -> None:
        """Write `card.json`, whole or not at all."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False)
        with atomic_write(folder / CARD) as part:
            part.write_text(text + "\n", encoding="utf-8")


def load_card(folder: Path) -> Card:
    """The card of a folder of weights.

    Raises GuardError if it is missing or malformed or the weights are not the card's.
    """
    card = read_card(folder)
    sha256 = weights_sha256(folder, METHODS[card.method].weights)
    if sha256 != card.weights_sha256:
        raise GuardError(
            "the weights are not those of the card",
            where=folder,
            got=sha256[:12],
            remedy="Train again or restore the folder",
        )
    return card


def check_rule(card: Card, rule: str, folder: Path) -> None:
    """Raise GuardError if the card is another rule's: its verdicts would pass for this one's."""
    if card.rule != rule:
        remedy = f"Run `make train RULE={rule}`, or put the folder where its own rule's weights are"
        raise GuardError(
            f"the weights are not of the rule {rule!r}", where=folder, got=card.rule, remedy=remedy
        )


def read_card(folder: Path) -> Card:
    """The card, with no look at the weights. Raises GuardError if it is missing or malformed."""
    path = folder / CARD
    if not path.is_file():
        problem = f"no {CARD}: not finished weights"
        if not folder.is_dir():
            problem += "; there is no such folder"
        raise GuardError(
            problem,
            where=folder,
            remedy="Run `make train` for this rule",
        )
    content = load_json(path, remedy="Train again or restore the folder")
    # A card of an earlier version: training without FORCE=1 would keep it.
    remedy = "Train it again: `make train` for this rule, with FORCE=1"
    return validate(content, Card, where=path, remedy=remedy)


def weights_sha256(folder: Path, name: str = PEFT_WEIGHTS) -> str:
    """SHA-256 of the weights file `name` of the folder and, where there are any, of the words
    beside it. Raises GuardError if there are no weights.
    """
    if not (folder / name).is_file():
        remedy = "Run `make train` for this rule, with FORCE=1"
        raise GuardError(f"no {name}", where=folder, remedy=remedy)
    return contents_sha256(weights_contents(folder, name))


def weights_contents(folder: Path, name: str) -> list[bytes]:
    """The weights file and, where there are any, the words beside it. Raises OSError."""
    contents = [(folder / name).read_bytes()]
    if (folder / WORDS).is_file():
        contents.append((folder / WORDS).read_bytes())
    return contents


def contents_sha256(contents: Sequence[bytes]) -> str:
    """What a card says of its weights."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()
