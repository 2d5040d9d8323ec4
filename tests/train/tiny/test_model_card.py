"""The committed card is what its provenance gives, and every state of a base has its sentences."""

import copy
import json
from typing import Any

import pytest

from guard.recipe import MODELS
from train.tiny.model_card import model_card

COMMITTED = MODELS / "tiny"


@pytest.fixture
def provenance() -> dict[str, Any]:
    return copy.deepcopy(json.loads((COMMITTED / "provenance.json").read_text()))  # type: ignore[no-any-return]


def test_the_committed_card_is_that_of_the_committed_provenance(provenance: dict[str, Any]) -> None:
    assert model_card(provenance) == (COMMITTED / "README.md").read_text()


def test_a_base_that_met_no_rule_says_so_by_silence(provenance: dict[str, Any]) -> None:
    provenance |= {"rules": [], "linear_probe": {}}
    for key in ("joint", "zero_shot"):
        del provenance[key]
    card = model_card(provenance)
    assert "- As a zero-shot judge it knows short rules about everyday acts" in card
    assert "Not measured on these weights." in card
    assert "phrase books of these rules" not in card
    assert "together with one aLoRA" not in card


def test_a_zero_shot_figure_of_other_weights_is_not_repeated(provenance: dict[str, Any]) -> None:
    del provenance["zero_shot"]
    assert "Not measured since." in " ".join(model_card(provenance).split())


def test_a_base_of_free_corpora_has_the_licence_of_the_corpora(provenance: dict[str, Any]) -> None:
    for corpus in provenance["corpora"]:
        corpus["licences"] = ["MIT"]
    card = model_card(provenance)
    assert "license: other" in card
    assert "| Licence of the weights | that of the corpora |" in card


def test_prose_keeps_to_a_hundred_columns(provenance: dict[str, Any]) -> None:
    lines = model_card(provenance).splitlines()
    prose = [line for line in lines if not line.startswith("|")]
    assert max(map(len, prose)) <= 100
