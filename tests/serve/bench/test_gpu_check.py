"""The report of a GPU: what is missing, cells that fail, and the whole of it in tiny shapes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench import gpu_check
from serve.bench.gpu_check import CellInput, Figures
from tests.serve.bench.toy_bench import bench_on


def check(runs: Path, *words: str) -> Any:
    return bench_on("gpu_check", runs, *words, recipe=load_recipe("tiny"))


def test_without_a_gpu_a_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.bench.gpu_check.gpus", list)
    with pytest.raises(GuardError, match=r"measures a GPU.*make setup DEVICE=cuda.*DRY=1"):
        check(tmp_path).main()
    assert not list(tmp_path.iterdir())


def counted(known: CellInput) -> Figures:
    """Notes in the home of its process that it was measured."""
    with (Path(os.environ["CENTURION_HOME"]) / "measured").open("a") as notes:
        notes.write("x")
    return {"tokens": known.tokens, "text": "a\ntable"}


def broken(known: CellInput) -> Figures:
    raise GuardError("no such kernel", got=known.before["first"]["tokens"])


def dying(known: CellInput) -> Figures:
    os._exit(3)


def endless(known: CellInput) -> Figures:
    time.sleep(600)
    return {}


@pytest.mark.slow
def test_a_cell_that_fails_says_why_the_next_goes_on_and_only_it_is_measured_again(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    cells = {"first": (counted, 90), "broken": (broken, 90), "dying": (dying, 90)}
    cells |= {"endless": (endless, 0.1), "last": (counted, 90)}
    monkeypatch.setattr(gpu_check, "CELLS", cells)
    monkeypatch.setenv("CENTURION_HOME", "")
    for _ in range(2):
        with pytest.raises(GuardError, match="these cells failed: broken, dying, endless"):
            check(tmp_path, "--dry").main()
    assert (tmp_path / "gpu_check" / "measured").read_text() == "xx"
    kept = json.loads((tmp_path / "gpu_check.json").read_text())["cells"]
    assert "no such kernel (got 120)" in kept["broken"]["text"]
    assert kept["dying"]["failure"] == "BrokenProcessPool"
    assert kept["endless"]["failure"] == "TimeoutError"
    page = (tmp_path / "gpu_check.md").read_text()
    assert "- **first**: tokens 120, seconds" in page and "## last\n\n```\na\ntable" in page
    (tmp_path / "gpu_check.md").unlink()
    with pytest.raises(GuardError):
        check(tmp_path, "--dry", "--force").main()
    assert (tmp_path / "gpu_check" / "measured").read_text() == "xx"  # a new home


@pytest.mark.slow
def test_in_tiny_shapes_every_cell_that_needs_no_gpu_has_figures(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("CENTURION_HOME", "")
    check(tmp_path, "--dry").main()
    cells = json.loads((tmp_path / "gpu_check.json").read_text())["cells"]
    skipped = [cell for cell, figures in cells.items() if "skipped" in figures]
    assert skipped == ["compiled", "captured", "real_weights"]
    reference, eager = cells["peft"], cells["eager"]
    assert eager["off_peft_nats"] <= reference["allowed_nats"] < reference["range_nats"] / 5
    assert {row["cell"]["mode"] for row in cells["latency"]["rows"]} > {"base", "lora", "alora"}
    assert cells["training"]["trl_step_s"] > cells["training"]["cached_step_s"] > 0
    assert "lower bound" in (tmp_path / "gpu_check.md").read_text()
