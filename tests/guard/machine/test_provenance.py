from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guard.home import ROOT
from guard.machine.provenance import commit, hardware, peak_memory_mib, provenance, versions


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["file", "new"], ids=["changed", "added"])
def test_a_checkout_is_named_by_its_commit_and_dirty_if_it_differs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = commit(tmp_path)
    assert len(clean) >= 7 and git(tmp_path, "rev-parse", "HEAD").startswith(clean)
    (tmp_path / name).write_text("2")
    assert commit(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    shutil.rmtree(tmp_path / ".git")
    assert commit(tmp_path) == "unknown"


def test_hardware_and_versions_are_those_of_this_machine_and_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = len(os.sched_getaffinity(0))
    assert re.fullmatch(rf"\S.*, {cores} cores, \d+ GiB memory, .+", hardware())
    assert set(provenance()) == {"commit", "hardware", "versions"}
    found = versions()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["vllm"][0].isdigit()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert hardware().endswith("NVIDIA H200, 143771 MiB")
    tool.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert hardware().endswith("no GPU")


def test_peak_memory_is_a_process_s_own_and_never_falls() -> None:
    held = bytearray(b"1") * (64 * 2**20)
    peak = peak_memory_mib()
    assert peak > 64
    del held
    assert peak_memory_mib() > peak - 2  # the kernel counts in steps
    own = "from guard.machine.provenance import peak_memory_mib; print(peak_memory_mib())"
    command = [sys.executable, "-c", own]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 5 < float(child.stdout) < 60
