"""The machine's device, what it is fast at, how busy others keep it, and what a number carries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from guard.home import ROOT
from guard.machine import device
from guard.machine.provenance import commit, hardware, peak_memory_mib, provenance, versions
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Each test tells its own machine, and the tests after it see the real one."""
    kept = (device.installed_device, device.cpu_info)
    for question in kept:
        question.cache_clear()
    yield
    for question in kept:
        question.cache_clear()


def test_a_build_for_cpus_says_so_in_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    stated: list[str] = []

    def version(name: str) -> str:
        if not stated:
            raise metadata.PackageNotFoundError(name)
        return stated[0]

    monkeypatch.setattr(metadata, "version", version)
    assert device.installed_device() == "cpu"
    for build, expected in {"2.13.0+cpu": "cpu", "2.13.0": "cuda", "2.13.0+cu130": "cuda"}.items():
        stated[:] = [build]
        device.installed_device.cache_clear()
        assert device.installed_device() == expected


def test_the_cpu_says_what_it_is_fast_and_slow_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of no file the system tells nothing."""
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert device.cpu_info("absent") == ""
    for line, multiplies, is_slow in (
        ("flags\t\t: fpu amx_bf16 sse", True, False),
        ("flags\t\t: fpu avx2 avx512f", False, False),
        ("vendor_id\t: AuthenticAMD", False, True),
        ("model name\t: AuthenticAMD amx_bf16", False, False),
    ):
        device.cpu_info.cache_clear()
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
        assert (device.multiplies_bfloat16(), device.is_slow_in_mkl()) == (multiplies, is_slow)


def test_what_compiling_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, headers = tmp_path / "cxx", tmp_path / "include"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(device.sysconfig, "get_path", lambda _: str(headers))
    assert device.missing_for_compiling() == f"a C++ compiler ({compiler})"
    compiler.touch(mode=0o755)
    assert device.missing_for_compiling() == "Python's headers (python3-dev)"
    headers.mkdir()
    (headers / "Python.h").touch()
    assert device.missing_for_compiling() is None


def test_a_busy_process_on_a_usable_core_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    percents = [96.0, 40.0, 100.0]
    monkeypatch.setattr(device.psutil, "cpu_percent", lambda **_: percents)
    for cores, said in (({0, 64}, "1.0 of 2 cores"), ({1}, ""), ({0, 1}, "1.4 of 2 cores")):
        monkeypatch.setattr(device, "usable_cores", lambda cores=cores: cores)
        device.warn_if_busy("it is slow")
        line = f"warning: other processes keep {said} busy: it is slow\n"
        assert capsys.readouterr() == ("", line if said else "")


def test_a_real_busy_process_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    program = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    program += "while True: pass"

    def is_noticed() -> bool:
        device.warn_if_busy("")
        return "warning" in capsys.readouterr().err

    with subprocess.Popen([sys.executable, "-c", program]) as process:
        wait_until(is_noticed)
        process.kill()


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
    assert found["torch"] == metadata.version("torch")
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
