"""What must hold for the embedded tiny base, recipes/models/tiny, and for its records."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from safetensors import safe_open

from data.generator.library import load_background, load_phrasebook
from data.generator.phrasebook import cores_of
from guard.layout import fingerprint
from guard.recipe import MODELS
from guard.rule import load_rule

TINY = MODELS / "tiny"


def content_of(file: str) -> dict[str, Any]:
    """One of the base's JSON files."""
    content: dict[str, Any] = json.loads((TINY / file).read_text(encoding="utf-8"))
    return content


def seen_phrasings(rule: str) -> str:
    """A digest of the phrasings that training sees of a rule; the base saw no others."""
    book = load_phrasebook(load_rule(rule), load_background())
    seen = [sorted(cores_of(act.cores, "seen")) for _, act in sorted(book.acts.items())]
    return fingerprint(seen)[:16]


def test_the_base_is_small_enough_to_commit_and_is_what_its_provenance_says() -> None:
    weights = TINY / "model.safetensors"
    with safe_open(weights, "pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - it is no mapping
    parameters = sum(math.prod(shape) for shape in shapes)
    assert parameters <= 16e6
    assert weights.stat().st_size <= 32e6
    provenance = content_of("provenance.json")
    assert provenance["parameters"] == parameters
    assert provenance["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_what_the_tests_call_unseen_was_unseen_by_the_base() -> None:
    """A failure says that a phrase book was edited: the base may have seen what is called unseen.

    Say so in the base's card.
    """
    provenance = content_of("provenance.json")
    recorded = provenance["phrasings"]
    assert set(recorded) == set(provenance["joint"]["rules"])
    assert {rule: seen_phrasings(rule) for rule in recorded} == recorded
