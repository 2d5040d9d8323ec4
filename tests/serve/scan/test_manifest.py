"""Whatever changes a verdict makes another scan."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.weights.card import load_card
from serve.scan.manifest import ScanManifest, calibration_of, manifest_of, weights_of
from serve.scan.parts import PartFolder
from tests.serve.cards import save_card
from tests.serve.scan.test_scan import write_rows


def test_a_rule_that_reads_other_turns_is_another_rule(tmp_path: Path) -> None:
    """A head of the same weights says something else then."""
    (tmp_path / PEFT_WEIGHTS).touch()
    save_card(tmp_path, "fine")
    card = load_card(tmp_path)
    manifest = ScanManifest(
        "tiny",
        {"a.jsonl": (5, 7)},
        {"fine": weights_of(card)},
        10,
        "jsonl",
        calibrations={"fine": calibration_of(card)},
        reads={"fine": card.reads},
    )
    manifest.check_served({"fine": card})
    with pytest.raises(GuardError, match="trained again since"):
        manifest.check_served({"fine": card.model_copy(update={"reads": "last tool"})})


def test_a_data_set_that_has_changed_is_another_scan(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", 18)
    before = manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl")
    assert manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl") == before
    write_rows(file, 19)
    after = manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl")
    PartFolder(tmp_path / "out", before)
    with pytest.raises(GuardError, match="changed: sources"):
        PartFolder(tmp_path / "out", after)
