"""The adapters that a benchmark measures with, and what it says where there are none."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from serve.bench.workload.adapter_folders import adapter_folders, copies
from tests.serve.cards import recipe
from tests.serve.guarded import save_adapter
from tests.signed import sign


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A folder with one trained rule."""
    runs = Runs(tmp_path)
    for method in recipe().adapter_methods:
        save_adapter(
            runs.adapter("tiny", "medical_advice", method), "medical_advice", seed=1, method=method
        )
    return runs


def test_without_trained_adapters_nothing_is_measured_and_the_flag_for_random_ones_is_named(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(GuardError, match=r"make train.*--random"),
        adapter_folders(recipe(), Runs(tmp_path), is_random=False),
    ):
        pytest.fail("no adapters, but the benchmark went on")


def test_an_adapter_of_another_base_is_left_out_with_its_remedy(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = save_adapter(
        runs.adapter("tiny", "pii_leak", "alora"), "pii_leak", seed=1, method="alora"
    )
    sign(stale, base_revision="0" * 64)
    with adapter_folders(recipe(), runs, is_random=False) as folders:
        assert folders == {
            method: [runs.adapter("tiny", "medical_advice", method)]
            for method in recipe().adapter_methods
        }
    printed = capsys.readouterr().out
    assert (
        printed.startswith("left out: ")
        and "trained on another base" in printed
        and "make train RULE=pii_leak MODEL=" in printed
    )
    shutil.rmtree(runs.root / "tiny" / "medical_advice" / "alora")
    with (
        pytest.raises(GuardError, match=r"another base.*make train RULE=pii_leak.*--random"),
        adapter_folders(recipe(), runs, is_random=False),
    ):
        pytest.fail("nothing to serve, but the benchmark went on")


def test_adapters_are_loaded_again_under_other_names() -> None:
    folders: dict[str, Sequence[Path]] = {"lora": [Path("a")], "alora": [Path("b"), Path("c")]}
    names, adapters = copies(folders, 3)
    assert names["alora"] == ["alora-0", "alora-1", "alora-2"]
    assert [str(adapters[name]) for name in names["alora"]] == ["b", "c", "b"]
    assert [str(adapters[name]) for name in names["lora"]] == ["a", "a", "a"]
