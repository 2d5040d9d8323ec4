"""The memory that is free, on the machine and within a container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from train.prefix.memory import free_memory


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_limits_it_is_the_machine_s(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert free_memory(tmp_path, own) == 1000
    own.write_text("0::/job\n")
    group(tmp_path / "job", memory__max="max", memory__current="10")
    assert free_memory(tmp_path, own) == 1000


def test_a_limit_holds_for_the_groups_within_it_and_pages_of_files_count_as_free(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/service/job\n")
    group(
        tmp_path / "service",
        memory__max="500",
        memory__current="300",
        memory__stat="anon 200\ninactive_file 60",
    )
    group(tmp_path / "service" / "job", memory__max="max", memory__current="100")
    assert free_memory(tmp_path, own) == 260


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu:/job\n4:memory,hugetlb:/job\n0::/\n")
    limits = {
        "memory__limit_in_bytes": "400",
        "memory__usage_in_bytes": "390",
        "memory__stat": "total_inactive_file 5",
    }
    group(tmp_path / "memory" / "job", **limits)
    assert free_memory(tmp_path, own) == 15


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    group(tmp_path, memory__max="500", memory__current="600")
    assert free_memory(tmp_path, own) == 0
