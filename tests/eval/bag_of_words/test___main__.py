"""The command, and that nothing of the test split is looked at before everything is chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval.bag_of_words.__main__ import RuleData as Data
from eval.bag_of_words.__main__ import measure
from guard.conversation.example import SPLITS, write_examples
from guard.home import ROOT
from tests.eval.bag_of_words.conftest import judged, last, rows


def test_no_test_row_is_seen_before_everything_is_chosen() -> None:
    """Test rows that say the opposite change the figures, never the choice."""
    splits = {split: rows(split, judged) for split in SPLITS}
    opposite = rows("test", lambda label, noise: judged(1 - label, noise))
    first = measure(Data("toy", "assistant", None, splits))
    second = measure(Data("toy", "assistant", None, splits | {"test": opposite}))
    assert first.variant == second.variant
    assert (first.quality.accuracy, second.quality.accuracy) == (1.0, 0.0)


@pytest.mark.slow
def test_the_command_measures_folders_and_files(tmp_path: Path) -> None:
    """Without adapters or a model; who is judged is who speaks last."""
    folder = tmp_path / "mine"
    for split in SPLITS:
        write_examples(folder / f"{split}.jsonl", rows(split, last))
    file = tmp_path / "toy__file.jsonl"
    lines = []
    for split in SPLITS:
        for row in rows(split, last):
            messages = [{"role": it.role, "content": it.content} for it in row.messages]
            lines.append(json.dumps({"messages": messages, "label": row.label}))
    file.write_text("\n".join(dict.fromkeys(lines)))
    command = [sys.executable, "-m", "eval.bag_of_words", "--data", folder, file]
    command += ["--splits", "new", "--json", tmp_path / "new folder/out.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "new folder/out.json").read_text())
    assert {"commit", "hardware", "versions", "seed"} <= set(content)
    assert content["rules"]["mine"]["metrics"]["auroc"] == 1.0
    assert content["rules"]["mine"]["variant"]["view"] == "last turn"
    assert set(content["rules"]) == {"mine", "toy__file"}
    assert "| toy__file" in done.stdout
    twice = subprocess.run(
        [*command[:4], folder, tmp_path / "other" / "mine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert twice.returncode == 2 and "two inputs have the same name" in twice.stderr
    missing = subprocess.run(
        [*command[:4], tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "error: " in missing.stderr and "train.jsonl: no such file" in missing.stderr
