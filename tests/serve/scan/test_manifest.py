"""Whatever changes a verdict makes another scan."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.weights.card import load_card
from serve.scan.manifest import ScanManifest, manifest_of
from serve.scan.parts import PartFolder
from tests.serve.cards import save_card
from tests.serve.scan.test_scan import write_rows


@pytest.mark.parametrize(
    "change", [{"reads": "last tool"}, {"threshold": 0.5}, {"bias": 0.25}, {"temperature": 3.0}]
)
def test_another_version_is_not_scanned_on(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / PEFT_WEIGHTS).touch()
    save_card(tmp_path, "fine")
    card = load_card(tmp_path)
    manifest = ScanManifest("tiny", {"a.jsonl": (5, 7)}, {"fine": card.version}, 10, "jsonl")
    manifest.check_served({"fine": card})
    with pytest.raises(GuardError, match="trained again since"):
        manifest.check_served({"fine": card.model_copy(update=change)})


def test_a_data_set_that_has_changed_is_another_scan(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", 18)
    before = manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl")
    assert manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl") == before
    write_rows(file, 19)
    after = manifest_of([], [f"hub:{tmp_path}"], 8, "jsonl")
    PartFolder(tmp_path / "out", before)
    with pytest.raises(GuardError, match="changed: sources"):
        PartFolder(tmp_path / "out", after)
